"""Differential privacy as a setting of the experiment: whose contribution is hidden, how much is clipped, the noise."""

from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedtailor.experiment.parts import Parts

QUANTILE = "quantile:"
FIRST_CLIP = 0.1  # of adaptive clipping (Andrew et al. 2021)


class Privacy(Parts):
    """Differential privacy of a run.

    `level` says whose contribution is hidden: a whole client's, or a single training sample's at each client. `clip`
    is the largest norm of a client's change, or of a sample's gradient; `quantile:0.5` follows the median norm of the
    changes. `noise` is the standard deviation of the Gaussian noise as a multiple of the clip; without it, it is found
    for the experiment's `epsilon`. `by` says who adds the noise to the mean of clients' changes.
    """

    example: ClassVar[str] = "client, clip=1.0, noise=0.8, delta=1e-5"

    level: Literal["client", "sample"]
    clip: str = "1.0"
    noise: float | None = Field(None, gt=0, le=1e6)
    delta: float = Field(1e-5, gt=0, lt=1)
    by: Literal["server", "clients"] = "server"

    @field_validator("clip", mode="before")
    @classmethod
    def _clip(cls, value: object) -> str:
        text = str(value).strip()
        share = text.removeprefix(QUANTILE)
        try:
            number = float(share)
            if 0 < number < (1 if share != text else 1e12):
                return f"{QUANTILE}{number}" if share != text else str(number)
        except ValueError:
            pass
        raise ValueError(f"a number above 0, or {QUANTILE}0.5 with a share between 0 and 1")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.level == "sample" and self.by != "server":
            raise ValueError("by is for client level, as samples' gradients always get their noise at the client")
        if self.quantile is not None and (self.level, self.by) != ("client", "server"):
            raise ValueError("only at client level with noise by the server can the clip follow a quantile")
        return self

    @property
    def quantile(self) -> float | None:
        """The share of clients whose changes stay whole under adaptive clipping; None if the clip is fixed."""
        return float(self.clip.removeprefix(QUANTILE)) if self.clip.startswith(QUANTILE) else None

    def in_words(self, simulated: bool, secure: bool = False) -> str:
        """Say what ε means, to stand below a table."""
        at = f"at δ = {self.delta:g}"
        if self.level == "client":
            what = f"ε {at} hides whether a whole client took part from all who see the models"
            server = "sees uploads with a share of the noise only" if self.by == "clients" else "adds the noise"
            if secure:
                what += " and from the server, which sees their sum alone (as far as no other client tells its noise)"
            else:
                what += f" (not from the server, which {server})"
        else:
            what = f"ε {at} hides each training sample of a client from all others, the server too; it is that of the "
            what += "client that has spent most"
        drawn = "; the noise is drawn from the experiment's seed, as this is a simulation" if simulated else ""
        return f"{what}{drawn}. Metrics are not covered by it."

    @property
    def bound(self) -> float:
        """The clip, or where an adaptive one begins."""
        return FIRST_CLIP if self.quantile is not None else float(self.clip)
