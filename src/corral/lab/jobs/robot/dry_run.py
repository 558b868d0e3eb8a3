"""`corral train --dry-run` for robots: a run's settings resolved and checked."""

from corral.lab.environments import ENVIRONMENTS
from corral.lab.jobs.robot.prepare import parameters, prepare
from corral.lab.jobs.robot.settings import Settings
from corral.lab.jobs.robot.unused import check_used
from corral.lab.run.settings import toml_lines
from corral.robot.learner import Learner


def rehearse(settings: Settings) -> list[str]:
    """Lines of a TOML file with these settings, after comments about the episodes and the networks."""
    check_used(settings)
    agent = prepare(settings)
    try:
        count, episodes = parameters(agent), agent.config.episodes
    finally:
        agent.plant.close()
    steps = ENVIRONMENTS[settings.environment].steps
    size = 8 if settings.dtype == "float64" and isinstance(agent, Learner) else 4  # baselines are float32
    return [
        f"# {settings.iterations:,} batches of {episodes:,} episodes of {steps} steps: "
        f"{settings.iterations * episodes * steps:,} steps of the environment",
        "# would fetch nothing",
        f"# {count:,} parameters are trained: {4 * size * count / 1e6:.2g} MB with gradients and Adam's moments",
        *toml_lines(settings.flat()),
    ]
