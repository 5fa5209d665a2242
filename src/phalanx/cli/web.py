"""`phalanx web`: a page over a folder of runs, live and afterwards; reads only, on this machine only."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from urllib.parse import quote

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say
from phalanx.errors import mistake
from phalanx.units import plural


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx web`."""
    parser.add_argument("runs", metavar="RUNS", help="a folder of runs, such as runs/, or one run")
    parser.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:8337", help="default: %(default)s")
    parser.add_argument("--token", metavar="FILE|auto", help="ask for the token in FILE, or for a new one")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    _require()
    from phalanx.io.listen import bound_address, open_socket, parse_address
    from phalanx.web.app import AccessPolicy
    from phalanx.web.guard import AccessKey
    from phalanx.web.run_store import open_shelf
    from phalanx.web.serve import allowed_hosts, is_any, serve

    shelf, address, token = open_shelf(args.runs), parse_address(args.listen), _token(args.token)
    with open_socket(address, guarded=token is not None) as listener:
        bound = bound_address(listener)
        url = f"http://{bound if not is_any(bound) else f'{_own_name()}:{bound.port}'}/"
        visit = f"{url}?token={quote(token, safe='')}" if token else url
        _tell(args, url, visit, token, len(shelf.runs()))
        if args.open:
            _browse(visit)
        key = AccessKey(token, port=bound.port) if token else None
        door = AccessPolicy(hosts=allowed_hosts(bound, asked=address.host), literals=is_any(bound), key=key)
        serve(listener, shelf, door=door, complain=note)
    return 0


def _tell(args: argparse.Namespace, url: str, visit: str, token: str | None, count: int) -> None:
    if args.json:
        print_json({"url": url, "token": token, "open": visit, "runs": count, "pid": os.getpid()})
    else:
        say(visit)
    sys.stdout.flush()  # whoever started us through a pipe waits for the address
    note(f"{plural(count, 'run')} in {args.runs}; stop with Ctrl-C")


def _require() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise mistake(
            "phalanx web",
            f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            why="it serves the page; training needs nothing of it",
            fix="pip install 'phalanx[web]'",
        )


def _token(choice: str | None) -> str | None:
    from phalanx.io.listen import read_token

    if choice is None:
        return None
    token = read_token(choice)
    if choice != "auto" and os.stat(choice).st_mode & (stat.S_IRGRP | stat.S_IROTH):
        note(f"warning: {choice}: others on this machine can read the token; chmod 600 keeps it yours")
    return token


def _own_name() -> str:
    import socket

    return socket.gethostname()


def _browse(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        note("no browser could be opened; open the address yourself")
