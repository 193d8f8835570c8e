"""Golden tests of GLM: recipe, reference logits and model."""
