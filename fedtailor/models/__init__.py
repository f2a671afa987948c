"""Models: the catalogue of networks, networks of the user's own, and what a run makes of a network."""

from fedtailor.models.networks import CATALOGUE, ModelLike, build_model, import_lines, wants_tokens

__all__ = ["CATALOGUE", "ModelLike", "build_model", "import_lines", "wants_tokens"]
