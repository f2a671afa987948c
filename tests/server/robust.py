"""The rules of robust aggregation, and a small federation to try them on."""

from typing import Any

RULES = ("median", "trimmed:0.2", "krum:1", "multi-krum:1,2", "geometric-median", "norm-bound:0.1")
MATRIX_RULES = RULES[:-1]
SMALL: dict[str, Any] = {
    "data": "digits", "clients": 5, "max_train": 20, "model": "mlp:8", "rounds": 2, "epochs": 1,
}  # fmt: skip
