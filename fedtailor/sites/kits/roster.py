"""A component in the server's kit that lets only the plan's sites register.

NVFlare lets in whoever has a certificate of the root: a site that left, or one of an earlier plan, has one too.
"""

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import NotAuthenticated
from nvflare.private.defs import ClientType, InternalFLContextKey


class Roster(FLComponent):  # type: ignore[misc]
    """Refuse sites that are not in the plan. Admins register too: what they may do is in authorization.json."""

    def __init__(self, sites: list[str]) -> None:
        super().__init__()
        self._sites = frozenset(sites)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Look at a registration before NVFlare does. The name is the one that the connection's certificate proved."""
        if event_type == EventType.CLIENT_REGISTER_RECEIVED:
            name = fl_ctx.get_prop(InternalFLContextKey.CLIENT_REG_SESSION).client_name
            if fl_ctx.get_prop(FLContextKey.CLIENT_TYPE) != ClientType.ADMIN and name not in self._sites:
                raise NotAuthenticated(f"{name} is not a site of the plan")
