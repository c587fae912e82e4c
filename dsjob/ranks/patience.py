"""How long one process waits for another, in seconds: several of these limits build on one another."""

from __future__ import annotations

# Once a rank has failed, in each other rank:
TO_NOTICE = 3.0  # in which it may find that out by itself
TO_SAVE = 10.0  # the same, while it saves
TO_TELL = 15.0  # in which it may still tell an error of its own
TO_SETTLE = 60.0  # in which a save in the background may come to its end
# And in the launcher:
TO_ANSWER = 5.0  # without a sign of life, after which a rank is killed
TO_END = TO_NOTICE + TO_SAVE + TO_TELL + TO_SETTLE + 2.0  # after which one that still answers is killed as well

TO_BE_SEEN = 10.0  # in which a network file system shows on one node what another one has written
TO_LEAVE = 10.0  # in which a side of a comparison ends once it is told to
TO_CATCH_UP = 2.0  # in which ranks that save in the background may end after one another
