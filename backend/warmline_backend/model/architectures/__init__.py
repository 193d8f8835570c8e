"""Architectures that mlx-lm lacks or has wrong; they shadow mlx-lm's own of the same `model_type`.  Engine thread.

Each module has what mlx-lm's have: a `Model` and a `ModelArgs`.  Their KV revision is part of the fingerprint.
"""

from warmline_backend.model.architectures import glm_moe_dsa

ARCHITECTURES = {"glm_moe_dsa": glm_moe_dsa}

# KV revision by module: the name and the digest that enter the fingerprint of KV.  Renew the digest (any new 64 hex
# digits) where a change of code changes the KV that it computes: stored KV is then computed again.  The values are name
# and source digest of the first release of each module, so that KV stored since then stays valid.
KV_REVISIONS = {
    "glm_moe_dsa": (
        "warmline_backend.models.glm_moe_dsa",
        "fdb2a4f72d9d78da30a81cf9b61dd1205e7ef5142fbadeb4a75c2c5e0e7a5a79",
    ),
    "glm_moe_dsa_config": (
        "warmline_backend.models.glm_moe_dsa_config",
        "5ea8557b27636080cab80b16fa7d14b53053a84dda432e58c280fb5794f3a574",
    ),
}
