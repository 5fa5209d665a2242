"""`phalanx fabric export`: a fabric and its traffic as files of htsim."""

from __future__ import annotations

import argparse
from pathlib import Path

from phalanx.cli.fabric_files import FABRIC_HELP, add_traffic, load_fabric, load_traffic
from phalanx.cli.options import add_json
from phalanx.cli.output import print_json, say
from phalanx.errors import mistake


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `phalanx fabric export`."""
    parser.add_argument("fabric", metavar="FABRIC", help=FABRIC_HELP)
    parser.add_argument("--topo", metavar="FILE.topo", help="write the fabric")
    parser.add_argument("--cm", metavar="FILE.cm", help="write the traffic")
    add_traffic(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the files, and say what they do not hold."""
    from phalanx.io.files import write_text
    from phalanx.sim.htsim.connection_matrix import matrix_of, write_cm
    from phalanx.sim.htsim.topology import write_topo

    if not args.topo and not args.cm:
        raise mistake("phalanx fabric export", "nothing to write", fix="add --topo FILE.topo, --cm FILE.cm or both")
    if not args.cm and (args.traffic or args.nbytes):
        raise mistake("phalanx fabric export", "traffic, but no file for it", fix="add --cm FILE.cm")
    fabric, said = load_fabric(args.fabric)
    topo = write_topo(fabric)
    said += topo.not_mapped
    files: list[dict[str, object]] = []
    matrix_text = ""
    if args.cm:
        traffic = load_traffic(args, fabric)
        matrix, changed = matrix_of(traffic.flows, topo.nodes, parts=fabric.planes)
        matrix_text, said = write_cm(matrix), said + changed
    if args.topo:
        write_text(Path(args.topo), topo.text, fix="name another --topo")
        files.append({"file": args.topo, "nodes": topo.nodes, "tiers": fabric.tiers})
    if args.cm:
        write_text(Path(args.cm), matrix_text, fix="name another --cm")
        files.append({"file": args.cm, "nodes": topo.nodes, "connections": len(traffic.flows)})
    if args.json:
        print_json({"fabric": fabric.name, "files": files, "not_mapped": said})
    else:
        say(_text(files, said))
    return 0


def _text(files: list[dict[str, object]], said: tuple[str, ...]) -> str:
    lines = []
    for one in files:
        rest = ", ".join(f"{value:,} {key}" for key, value in one.items() if key != "file")
        lines.append(f"wrote {one['file']}: {rest}")
    return "\n".join([*lines, *(f"  not mapped: {one}" for one in said)])
