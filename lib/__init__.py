"""Tandem's packages; each imports only from those before it in this list (docs/architecture.md).

errors, config, system, data model distributed, plan, training, evaluate, rollouts, then report, export, launch, serve.

Where to begin: `train` is the story of a run. `lib.config.settings` has every setting, `lib.plan.strategy` decides who
does how much, `lib.training.step` does it, and `lib.distributed.world` is all that passes between ranks.
"""

from lib import environment

environment.enter()
