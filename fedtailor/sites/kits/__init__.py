"""Start-up kits: keys, certificates and safe policies of the server, its admin and every site; and their doctor.

A kit is a directory as NVFlare wants it (`startup/`, `local/`, `transfer/`). Keys are made where they are used.
"""

from fedtailor.sites.kits.tools import need_nvflare

need_nvflare()  # and what it brings: the modules below import it

from fedtailor.sites.kits.doctor import doctor  # noqa: E402
from fedtailor.sites.kits.exchange import Sent, approve, install, request_kit  # noqa: E402
from fedtailor.sites.kits.findings import Finding  # noqa: E402
from fedtailor.sites.kits.kit import make_kits, renew_kits  # noqa: E402
from fedtailor.sites.kits.revocations import revoke  # noqa: E402

__all__ = ["Finding", "Sent", "approve", "doctor", "install", "make_kits", "renew_kits", "request_kit", "revoke"]
