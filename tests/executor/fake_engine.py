"""Stands in for an engine where the process matters and not what it computes.

    python fake_engine.py serve MODEL ... --port P [--headless]

Answers /health at once, or after --slow seconds; a headless one only lives.
"""

from __future__ import annotations

import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    words = sys.argv[1:]
    if "--headless" in words:
        time.sleep(600)
    if "--slow" in words:
        time.sleep(float(words[words.index("--slow") + 1]))
    port = int(words[words.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
