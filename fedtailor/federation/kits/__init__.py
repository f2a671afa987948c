"""Start-up kits: keys, certificates and safe policies of the server, its admin and every site; and their doctor.

A kit is a directory as NVFlare wants it (`startup/`, `local/`, `transfer/`). Keys are made where they are used.
"""

from fedtailor.federation.kits.exchange import Sent, approve, install, request_kit
from fedtailor.federation.kits.making import make_kits

__all__ = ["Sent", "approve", "install", "make_kits", "request_kit"]
