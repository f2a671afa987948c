"""Hostile clients of a simulation, for tests and studies: what they train on, and what they upload.

Neither the server nor the sites know of an attack: whoever puts a simulation together gives hostile clients poisoned
samples (`poisoning`), or a transport on which their uploads are changed (`tampering`).
"""

from fedtailor.hostile.poisoning import TARGET, Trigger, find_trigger, hostile_clients, poisoned
from fedtailor.hostile.tampering import Tampering, little_z

__all__ = ["TARGET", "Tampering", "Trigger", "find_trigger", "hostile_clients", "little_z", "poisoned"]
