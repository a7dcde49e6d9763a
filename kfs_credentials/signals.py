"""Signals about what has happened. Receivers log and count: nothing here depends on them.

- `refs_moved`: after the commit, once for each batch and kind of event: `using` (the database alias), `kind` (an
  `EventKind`), `refs` (a tuple), `actor`, `detail` (a code, or None). What is rolled back sends nothing. The sender is
  the model `Event`.
- `worker_ticked`: a worker has come to the end of a step: `using`, `role`, `worker`. At most once a second.
- `worker_refused`: a worker or a command has refused to work: `using`, `role`, `reason` (a `RefusalReason`). The sender
  of these two are the models `Tick` and `Refusal`.

An error in a receiver is logged, and keeps nobody from working. A receiver runs on the thread of whoever moved the
refs, which does not go on before it returns: what takes long belongs elsewhere. No signal ever carries a value.
"""

from __future__ import annotations

from django.dispatch import Signal

refs_moved = Signal()
worker_ticked = Signal()
worker_refused = Signal()
