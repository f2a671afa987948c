"""A component in the server's kit that lets only the plan's sites register, with certificates that are not revoked.

NVFlare lets in whoever has a certificate of the root: a site that left, or one of an earlier plan, has one too. And who
has registered once has a token for ever, with which a sign of life is enough to be let in again: so the token of a site
whose certificates were revoked must be one that a later certificate got.
"""

import json
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import NotAuthenticated
from nvflare.private.defs import CellMessageHeaderKeys, ClientType, InternalFLContextKey
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.utils.identity_utils import IdentityVerifier

from fedtailor._common.files import make_directory, write_atomically
from fedtailor.sites.kits.revocations import REVOKED, is_revoked, issued, read_revoked

ADMITTED = Path("storage") / "admitted.json"  # in the kit, where the server works: whose token is of which certificate


class Roster(FLComponent):  # type: ignore[misc]
    """Refuse sites that are not in the plan. Admins register too: what they may do is in authorization.json."""

    def __init__(self, sites: list[str]) -> None:
        super().__init__()
        self._sites = frozenset(sites)
        self._issued: dict[str, datetime] = {}  # of the certificate that a site showed last
        IdentityVerifier.verify_common_name = self._before_verifying(IdentityVerifier.verify_common_name)
        ClientManager.authenticate = self._after_registering(ClientManager.authenticate)
        ClientManager.heartbeat = self._before_heartbeat(ClientManager.heartbeat)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Look at a registration before NVFlare does. The name is the one that the connection's certificate proved."""
        if event_type == EventType.CLIENT_REGISTER_RECEIVED:
            name = fl_ctx.get_prop(InternalFLContextKey.CLIENT_REG_SESSION).client_name
            if fl_ctx.get_prop(FLContextKey.CLIENT_TYPE) != ClientType.ADMIN and name not in self._sites:
                raise NotAuthenticated(f"{name} is not a site of the plan")

    def _before_verifying(self, verify: Callable[..., bool]) -> Callable[..., bool]:
        """Refuse a revoked certificate wherever NVFlare looks at one."""

        @wraps(verify)
        def checked(verifier: Any, asserted_cn: str, *args: Any, asserter_cert: Any, **more: Any) -> bool:
            if is_revoked(read_revoked(REVOKED), asserted_cn, issued(asserter_cert)):
                raise NotAuthenticated(f"the certificate of {asserted_cn} is revoked")
            self._issued[asserted_cn] = issued(asserter_cert)
            return verify(verifier, asserted_cn, *args, asserter_cert=asserter_cert, **more)

        return checked

    def _after_registering(self, authenticate: Callable[..., Any]) -> Callable[..., Any]:
        """Write down which certificate a token was given for: the server may be started again."""

        @wraps(authenticate)
        def noted(manager: Any, request: Any, fl_ctx: FLContext) -> Any:
            client = authenticate(manager, request, fl_ctx)
            if client and request.get_header(CellMessageHeaderKeys.CLIENT_TYPE) == ClientType.REGULAR:
                with manager.lock:
                    entry = [_digest(client.token), self._issued[client.name].isoformat()]
                    make_directory(ADMITTED.parent)
                    write_atomically(ADMITTED, json.dumps({**_admitted(), client.name: entry}))
            return client

        return noted

    def _before_heartbeat(self, heartbeat: Callable[..., bool]) -> Callable[..., bool]:
        """Have no sign of life count that comes with the token of a revoked certificate: NVFlare then takes the site
        for gone within its time for that, and does not let it in again."""

        @wraps(heartbeat)
        def checked(manager: Any, token: str, client_name: str, client_fqcn: str, fl_ctx: FLContext) -> bool:
            if client_name in (revoked := read_revoked(REVOKED)):
                digest, when = _admitted().get(client_name, ("", ""))
                if digest != _digest(token) or is_revoked(revoked, client_name, datetime.fromisoformat(when)):
                    said = f"the certificate of {client_name} is revoked"
                    fl_ctx.set_prop(FLContextKey.UNAUTHENTICATED, said, sticky=False)
                    manager.logger.warning(f"A sign of life was refused: {said}.")
                    return False
            return heartbeat(manager, token, client_name, client_fqcn, fl_ctx)

        return checked


def _digest(token: str) -> str:
    return sha256(token.encode()).hexdigest()


def _admitted() -> dict[str, list[str]]:
    try:
        return dict(json.loads(ADMITTED.read_text("utf-8")))
    except (OSError, ValueError):
        return {}
