"""A component in every site's kit that closes the site to all commands of the server but those that run jobs.

NVFlare's policies are asked only if the server says so in its message: a server that was tampered with could read files
of a site, its private key among them, in spite of them. Here the handlers of such commands are taken away.
"""

import os

from nvflare.apis.fl_component import FLComponent
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.security.logging import SECURE_LOGGING_VAR_NAME

KEPT = {
    "AbortAppProcessor",
    "AbortTaskProcessor",
    "CancelResourceProcessor",
    "CheckResourceProcessor",
    "ClientStatusProcessor",
    "DeleteRunNumberProcessor",
    "DeployProcessor",
    "NotifyJobStatusProcessor",
    "ReportVersionProcessor",
    "ScopeInfoProcessor",
    "StartJobProcessor",
}


class Guard(FLComponent):  # type: ignore[misc]
    """Answer only what jobs need, and let no text of an exception out: NVFlare then tells its kind alone."""

    def __init__(self) -> None:
        super().__init__()
        known = ClientRequestProcessors.request_processors
        known[:] = [one for one in known if type(one).__name__ in KEPT]
        os.environ[SECURE_LOGGING_VAR_NAME] = "true"  # for the jobs' processes too
