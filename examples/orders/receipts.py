"""Receives receipts by webhook: takes what is signed with the shop's secret, each receipt once.

The signature is checked by the public library of Standard Webhooks. Deliveries come at least once:
`webhook-id` is the same at every try, and what is known by it is not taken again. A real receiver
keeps the ids where it keeps the receipts, in one transaction.

Every third receipt is taken, and then the answer is lost: the shop must send it again.
"""

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from standardwebhooks.webhooks import Webhook, WebhookVerificationError

webhook = Webhook(os.environ["RECEIPT_SECRET"])
taken = {}
lock = Lock()


class Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            webhook.verify(body, headers)
        except WebhookVerificationError as error:
            print(f"refused {error}", flush=True)
            return self.answer(401)
        name = headers["webhook-id"]
        with lock:
            known = name in taken
            taken.setdefault(name, body)
            loses_answer = not known and len(taken) % 3 == 0
        line = "repeat" if known else "receipt"
        print(f"{line} {name} {body.decode().strip()}", flush=True)
        self.answer(500 if loses_answer else 204)

    def answer(self, status):
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    port = int(os.environ["RECEIPTS_PORT"])
    server = ThreadingHTTPServer(("127.0.0.1", port), Receiver)
    print("ready", flush=True)
    server.serve_forever()
