"""SkyRL's own PPO and GRPO with DPPO, from its own entry point. Needs: pip install skyrl==0.4.0, on Python 3.12 or newer.

python examples/engines/skyrl_dppo.py trainer.algorithm.policy_loss_type=corral_dppo ...        and SkyRL's other settings
"""

from skyrl.train.entrypoints.main_base import main

from corral.engines.skyrl import register

register("dppo", bound=0.2)  # before SkyRL starts Ray, which takes its losses along

if __name__ == "__main__":
    main()
