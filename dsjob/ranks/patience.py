"""How long processes wait for each other, in seconds. Some of these limits depend on others."""

from __future__ import annotations

# In every other rank, after one has failed:
TO_NOTICE = 3.0  # for its own error, such as a closed connection
TO_SAVE = 10.0  # the same, while it saves
TO_TELL = 15.0  # for reporting an error of its own
TO_SETTLE = 60.0  # for a background save to finish
# In the launcher:
TO_ANSWER = 5.0  # without a sign of life; then the rank is killed
TO_END = TO_NOTICE + TO_SAVE + TO_TELL + TO_SETTLE + 2.0  # in total; then a rank is killed even if it still responds

TO_SHARE = 10.0  # for another rank to come to the same error; interpreters start at different speeds
TO_BE_SEEN = 10.0  # for a network file system to show a file on another node
TO_LEAVE = 10.0  # for one side of a comparison to end when told to
TO_CATCH_UP = 2.0  # between the ends of the background saves of different ranks

# When all ranks must make the same call:
TO_BE_SURE = 6.0  # for a rank that is ahead of the others; a background save may put it ahead for a moment
TO_SAY = 20.0  # before a rank says that it waits for the others
TO_SAY_AGAIN = 60.0  # between messages of ranks that wait for others without a limit
TO_MISS = 120.0  # without a sign of life of what is waited for; then it counts as gone
