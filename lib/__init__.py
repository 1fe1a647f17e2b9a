"""Tandem's floors: each module imports only from the floors below it (see the README's tree).

Where to begin: `train` is the story of a run. `lib.config` has every setting, `lib.plan` decides who does how much, `lib.step` does
it, and `lib.sync` is all that passes between ranks. `lib.losses` and `lib.merge` follow their papers. `lib.launcher` starts ranks,
`lib.preflight` looks before, `lib.watch` and `lib.checkpoint` are for when something breaks. `lib.data` reads, `lib.evaluate` judges,
`lib.server` serves, `lib.dashboard` shows.
"""

from lib import environment

environment.enter()
