"""Stands in for an engine where the process matters and not what it computes.

    python fake_engine.py serve MODEL ... [--host H] --port P [--headless]

Answers /health at once, or after --slow seconds, and completions with as many tokens as asked for;
a headless one only lives.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        """A stream of tokens, and how many they were."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for _ in range(asked["max_tokens"]):
            self.event({"choices": [{"text": "x", "finish_reason": None}]})
            time.sleep(0.001)
        usage = {"prompt_tokens": 1, "completion_tokens": asked["max_tokens"]}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, content: object) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    words = sys.argv[1:]
    if "--headless" in words:
        time.sleep(600)
    if "--slow" in words:
        time.sleep(float(words[words.index("--slow") + 1]))
    host = words[words.index("--host") + 1] if "--host" in words else "127.0.0.1"
    port = int(words[words.index("--port") + 1])
    ThreadingHTTPServer((host, port), Handler).serve_forever()


if __name__ == "__main__":
    main()
