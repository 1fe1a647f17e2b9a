"""Tandem's packages; each imports only from those before it in this list (docs/architecture.md).

errors, config, system, telemetry / data / model, distributed, plan, training, evaluate, dashboard / launch, serve.

Where to begin: `train` is the story of a run. `lib.config.schema` has every setting, `lib.plan.strategy` decides who
does how much, `lib.training.step` does it, and `lib.distributed.world` is all that passes between ranks.
`lib.training.losses` and `lib.training.local_sgd` follow their papers. `lib.launch.supervisor` starts ranks.
"""

from lib import environment

environment.open_closed_streams()
environment.enter()

from lib import late_imports  # noqa: E402  (by the interpreter that stays, and not by one that is too old)

late_imports.install()
