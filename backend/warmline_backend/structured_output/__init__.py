"""Answers of a form that the client asks for: checked when a prompt is rendered, held to token by token.

    asked    what a body asks for (pure)
    schemas  JSON schemas, made fit for llguidance (pure)
    lark     pieces of grammar text (pure)
    calls    how each model family writes tool calls (pure)
    plan     what is asked for, and the prompt's end, as one constraint (pure)
    compiler the tokenizer as llguidance wants it; grammars compiled within limits, and kept
    guide    one answer on its way: which tokens may come next

A constraint belongs to the prompt and is shared; a guide belongs to one run of one sequence.
"""
