"""For all tests."""

from __future__ import annotations

import signal

# A script's `&` and `nohup` make pytest ignore these, and what a test starts would ignore them too, although tests send
# them. A handler that does nothing is not inherited.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)
