"""Architectures that mlx-lm doesn't have, or has wrong.  They shadow mlx-lm's own of the same `model_type`.

Each module has what mlx-lm's have: a `Model` and a `ModelArgs`.  Their source is part of the fingerprint.
"""

from warmline_backend.model.architectures import glm_moe_dsa

ARCHITECTURES = {"glm_moe_dsa": glm_moe_dsa}
