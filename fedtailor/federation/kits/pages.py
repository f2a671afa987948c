"""What each role reads: a page of a few lines, and a site's file to fill in."""

from fedtailor.federation.plan import Plan


def page(plan: Plan, name: str, central: bool) -> str:
    """The page of a role."""
    return f"# {name}\n"


def site_template(plan: Plan, name: str) -> str:
    """A site's file, to be filled in."""
    return f'name = "{name}"\n'
