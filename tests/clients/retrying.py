"""A client as many are: requests on urllib3, whose Retry sends again by itself.

retrying.py BASE COUNT: posts COUNT operations, each under a key of its own, and prints for each
what became of it, one JSON object a line.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

# A conflict is worth another try only when the answer says when.
Retry.RETRY_AFTER_STATUS_CODES = frozenset([409, 413, 429, 503])

SESSIONS = threading.local()


def session():
    if not hasattr(SESSIONS, "session"):
        retry = Retry(
            total=10,
            allowed_methods=None,
            status_forcelist=[502, 503, 504],
            backoff_factor=0.05,
            raise_on_status=False,
        )
        SESSIONS.session = requests.Session()
        SESSIONS.session.trust_env = False
        SESSIONS.session.mount("http://", HTTPAdapter(max_retries=retry))
    return SESSIONS.session


def operation(base, n):
    told = {"key": f"op-{n}", "status": 0, "idempotency": "", "problem": "", "error": ""}
    try:
        answer = session().post(
            f"{base}/op/{n}",
            data=json.dumps({"n": n}),
            headers={"Idempotency-Key": told["key"], "Content-Type": "application/json"},
            timeout=0.5,
        )
        told["status"] = answer.status_code
        told["idempotency"] = answer.headers.get("Idempotency-Status", "")
        if answer.headers.get("Content-Type") == "application/problem+json":
            told["problem"] = answer.json()["type"].rsplit("/", 1)[-1]
    except requests.RequestException as error:
        told["error"] = repr(error)
    return told


def main():
    base, count = sys.argv[1], int(sys.argv[2])
    with ThreadPoolExecutor(max_workers=16) as pool:
        for told in pool.map(lambda n: operation(base, n), range(count)):
            print(json.dumps(told))


main()
