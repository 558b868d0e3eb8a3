"""How good can a plan be on the via-point arm? The best of each context, by gradient descent through the arm itself.

python -m results.robots.via_point dense 5                (reward, basis functions; 15 s of one core)
python -m results.robots.via_point dense 5 --network      the recipe's policy network instead of one plan a context (75 s)

What no learner can beat with plans of that many basis functions, up to what descent misses; and whether what the reward likes
best is a success. With a network: what that network can hold of it, were its gradients exact.
"""

import argparse

import torch
from torch import Tensor

from corral.lab.environments import ENVIRONMENTS, make_envs
from corral.lab.environments.via_point import DT, REACHED, STEPS, STRENGTH
from corral.robot import ProDMP
from corral.robot.episode import episode_seeds, held_out_seeds
from corral.robot.policy import GaussianPolicy
from corral.robot.vector import reset_each

ENVIRONMENT = ENVIRONMENTS["corral/ViaPointReacher-v0"]
CONTEXTS, DESCENTS, RATE, LEAK = 64, 400, 0.05, 0.02
BATCH, BATCHES, NETWORK_RATE, HIDDEN = 256, 1200, 2e-3, (128, 128)


def follow(context: Tensor, positions: Tensor, velocities: Tensor, reward: str) -> tuple[Tensor, Tensor]:
    """Returns [E] and the tip's distances [E T] to the point that counts, of plans [E T 5]; as `Arms`, with gradients."""
    tracking = ENVIRONMENT.tracking
    angles, speeds = context[:, :5], context[:, 5:10]
    returns, distances = context.new_zeros(len(context)), []
    for step in range(1, STEPS + 1):
        wanted = tracking.p * (positions[:, step - 1] - angles) + tracking.d * (velocities[:, step - 1] - speeds)
        torque = wanted.clamp(-1, 1)
        torque = torque + LEAK * (wanted - wanted.detach()) * (wanted.abs() > 1)  # a gradient where the motor is at its limit
        speeds = speeds + STRENGTH * DT * torque
        angles = angles + DT * speeds
        heading = angles.cumsum(-1)
        tip = torch.stack([heading.cos().sum(-1), heading.sin().sum(-1)], -1)
        distance = (tip - (context[:, 10:12] if step <= STEPS // 2 else context[:, 12:14])).norm(dim=-1)
        paid = 0.2 if reward == "dense" else 10.0 * (step in (STEPS // 2, STEPS))
        returns = returns - paid * distance - 2e-3 * torque.square().sum(-1)
        distances.append(distance)
    return returns, torch.stack(distances, -1)


def best_plans(reward: str, prodmp: ProDMP, context: Tensor) -> Tensor:
    """Parameters [E W] of each context's own plan, by descent."""
    params = (0.05 * torch.randn(len(context), prodmp.parameters)).requires_grad_()
    optimizer = torch.optim.Adam([params], RATE)
    for number in range(DESCENTS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - number / (DESCENTS + 1))
        descend(optimizer, follow(context, *plan(prodmp, params, context), reward)[0])
    return params.detach()


def network_plans(reward: str, prodmp: ProDMP, context: Tensor) -> Tensor:
    """Parameters [E W] of a network's plans, trained by descent on other contexts."""
    mean = GaussianPolicy(context.shape[-1], prodmp.parameters, HIDDEN).mean.to(context.dtype)
    optimizer, envs = torch.optim.Adam(mean.parameters(), NETWORK_RATE), make_envs("corral/ViaPointReacher-v0", BATCH)
    for number in range(BATCHES):
        optimizer.param_groups[0]["lr"] = NETWORK_RATE * (1 - number / (BATCHES + 1))
        seen = torch.from_numpy(reset_each(envs, episode_seeds(0, number, BATCH))[0]).to(context)
        descend(optimizer, follow(seen, *plan(prodmp, mean(seen), seen), reward)[0])
    return mean(context).detach()


def plan(prodmp: ProDMP, params: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
    """Desired positions and velocities [E T 5]."""
    return prodmp.trajectory(DT * torch.arange(1, STEPS + 1), params, context[:, :5], context[:, 5:10])


def descend(optimizer: torch.optim.Optimizer, returns: Tensor) -> None:
    """One step towards higher returns."""
    optimizer.zero_grad()
    (-returns.mean()).backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reward", choices=["dense", "sparse"])
    parser.add_argument("basis", type=int)
    parser.add_argument("--network", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32 if chosen.network else torch.float64)
    torch.manual_seed(0)
    contexts = BATCH if chosen.network else CONTEXTS
    start, _ = reset_each(make_envs("corral/ViaPointReacher-v0", contexts), held_out_seeds(contexts))
    context = torch.from_numpy(start).to(torch.get_default_dtype())
    prodmp = ProDMP(5, chosen.basis, 2.0, alpha=10.0, auto_scale=True, relative_goal=True)
    params = (network_plans if chosen.network else best_plans)(chosen.reward, prodmp, context)
    returns, distances = follow(context, *plan(prodmp, params, context), chosen.reward)
    half, last, passed = distances[:, STEPS // 2 - 1], distances[:, -1], distances[:, : STEPS // 2].amin(-1)
    print(f"{chosen.reward}, {chosen.basis} basis functions, {contexts} held-out contexts: return {returns.mean():.2f}")
    print(f"median distances: via-point {half.median():.2f} m half-way, {passed.median():.2f} m at the nearest, goal "
          f"{last.median():.2f} m")  # fmt: skip
    for when, distance in (("half-way", half), ("at some moment of the first half", passed)):
        share = ((distance < REACHED) & (last < REACHED)).double().mean()
        print(f"within {REACHED} m of the via-point {when}, and of the goal in the end: {float(share):.0%}")


if __name__ == "__main__":
    main()
