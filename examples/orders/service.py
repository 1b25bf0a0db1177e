"""A small order service, as there are many: it keeps orders in memory, counts them, and can't tell a
retry from a new order. What it is asked for happens, as often as it is asked.

    POST /orders    takes an order at once
    POST /imports   takes a list of orders, which takes a while

It prints a line for everything that happens, with the Idempotency-Key that came with it. It does
not look at the key.
"""

import itertools
import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

IMPORT_SECONDS = 1.5

numbers = {"order": itertools.count(1), "import": itertools.count(1)}
kept = []


class Service(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        what = {"/orders": "order", "/imports": "import"}.get(self.path)
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if what is None:
            return self.answer(404, {"error": "there is nothing here"})
        try:
            item = dict(json.loads(asked))
        except (TypeError, ValueError):
            return self.answer(400, {"error": "write a JSON object"})
        number = next(numbers[what])
        print(f"{what} {number} key={self.headers.get('Idempotency-Key')}", flush=True)
        if what == "import":
            time.sleep(IMPORT_SECONDS)
        kept.append((what, number, item))
        self.answer(201, {what: number, **item})

    def answer(self, status, body):
        body = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Who asked may be gone by the time of the answer."""


if __name__ == "__main__":
    port = int(os.environ["SERVICE_PORT"])
    server = Server(("127.0.0.1", port), Service)
    print("ready", flush=True)
    server.serve_forever()
