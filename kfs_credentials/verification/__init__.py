"""Whether what is always true is true: looked at on a live database and its store, in batches, locking nobody.

- `findings`: what can be found, and what to do about each.
- `database`: goes through the tables.
- `deep`: reads every object of every ref in use; `objects`: goes through what the store lists.
- `leftovers`: where old plaintext still is, after it was moved.
"""
