"""`corral train --dry-run` for robots: a run's settings resolved and checked."""

from corral.robot.prepare import parameters, prepare
from corral.robot.settings import Settings
from corral.run.settings import toml_lines


def rehearse(settings: Settings) -> list[str]:
    """Lines of a TOML file with these settings, after a comment about the networks."""
    agent = prepare(settings)
    try:
        count = parameters(agent)
    finally:
        agent.plant.close()
    return [f"# would fetch nothing; {count:,} parameters are trained", *toml_lines(settings.flat())]
