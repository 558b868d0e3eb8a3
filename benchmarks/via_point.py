"""How good can a plan be on the via-point arm? The best of each context, by gradient descent through the arm itself.

python benchmarks/via_point.py dense 5        (reward, basis functions; 15 s of one core)

What no learner can beat with plans of that many basis functions, up to what descent misses; and whether what the reward likes
best is a success.
"""

import argparse

import torch
from torch import Tensor

from corral.robot import ProDMP
from corral.robot.env import ENVIRONMENTS, make_envs
from corral.robot.env.via_point import DT, REACHED, STEPS, STRENGTH
from corral.robot.episode import held_out_seeds

ENVIRONMENT = ENVIRONMENTS["corral/ViaPointReacher-v0"]
CONTEXTS, DESCENTS, RATE, LEAK = 64, 400, 0.05, 0.02


def follow(context: Tensor, positions: Tensor, velocities: Tensor, reward: str) -> tuple[Tensor, Tensor]:
    """Returns [E] and the tip's distances [E T] to the point that counts, of plans [E T 5]; as `Arms`, with gradients."""
    tracking = ENVIRONMENT.tracking
    angles, speeds = context[:, :5], context[:, 5:10]
    returns, distances = torch.zeros(len(context)), []
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reward", choices=["dense", "sparse"])
    parser.add_argument("basis", type=int)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    context = torch.from_numpy(make_envs("corral/ViaPointReacher-v0", CONTEXTS).reset(seed=held_out_seeds(CONTEXTS))[0])
    prodmp = ProDMP(5, chosen.basis, 2.0, alpha=10.0, auto_scale=True, relative_goal=True)
    times = DT * torch.arange(1, STEPS + 1)
    params = (0.05 * torch.randn(CONTEXTS, prodmp.parameters)).requires_grad_()
    optimizer = torch.optim.Adam([params], RATE)
    for number in range(DESCENTS + 1):
        optimizer.param_groups[0]["lr"] = RATE * (1 - number / (DESCENTS + 1))
        plans = prodmp.trajectory(times, params, context[:, :5], context[:, 5:10])
        returns, distances = follow(context, *plans, chosen.reward)
        optimizer.zero_grad()
        (-returns.sum()).backward()
        if number < DESCENTS:
            optimizer.step()
    half, last, passed = distances[:, STEPS // 2 - 1], distances[:, -1], distances[:, : STEPS // 2].amin(-1)
    print(f"{chosen.reward}, {chosen.basis} basis functions, {CONTEXTS} held-out contexts: return {returns.mean():.2f}")
    print(f"median distances: via-point {half.median():.2f} m half-way, {passed.median():.2f} m at the nearest, goal "
          f"{last.median():.2f} m")  # fmt: skip
    for when, distance in (("half-way", half), ("at some moment of the first half", passed)):
        share = ((distance < REACHED) & (last < REACHED)).double().mean()
        print(f"within {REACHED} m of the via-point {when}, and of the goal in the end: {float(share):.0%}")


if __name__ == "__main__":
    main()
