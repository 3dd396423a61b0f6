"""Picture of a node's rails: ranks on the left, NICs on the right, thick lines to near NICs."""

from __future__ import annotations

from html import escape

from r2serve.topo.node import Nic, NodeReport

_ROW, _LEFT, _RIGHT, _WIDTH, _HEIGHT = 64, 30, 470, 330, 46
_STYLE = """text{font:13px sans-serif}.small{font-size:11px;fill:#555}
rect{fill:#fff;stroke:#555}.rail rect{stroke:#0a7;stroke-width:2}.down rect{stroke:#c33}
.unused rect{stroke-dasharray:4 3}line{stroke:#999}line.near{stroke:#0a7;stroke-width:3}"""


def draw(node: NodeReport) -> str:
    """Returns the node as SVG."""
    rows = max(len(node.nics), len(node.chains), 1)
    height = rows * _ROW + 60
    places = {nic.name: place for place, nic in enumerate(node.nics)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="830" height="{height}" role="img">',
        f"<title>rails of {escape(node.host)}</title><style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="24">{escape(node.host)}</text>',
    ]
    for row, chain in enumerate(node.chains):
        for place, step in enumerate(chain.steps):
            near = ' class="near"' if place == 0 else ""
            parts.append(
                f'<line{near} x1="{_LEFT + 200}" y1="{_middle(row)}" x2="{_RIGHT}" '
                f'y2="{_middle(places[step.nic])}"><title>{step.distance}</title></line>'
            )
    for row, chain in enumerate(node.chains):
        order = " → ".join(f"{step.nic} ({step.distance})" for step in chain.steps)
        parts.append(_box(_LEFT, row, 200, "", chain.rank, order))
    for row, nic in enumerate(node.nics):
        first = f"{nic.name} {nic.rail and f'= {nic.rail}'} {nic.rdma}"
        parts.append(_box(_RIGHT, row, _WIDTH, _class(nic), first, _details(nic)))
    return "\n".join([*parts, "</svg>\n"])


def _middle(row: int) -> int:
    return 40 + row * _ROW + _HEIGHT // 2


def _box(x: int, row: int, width: int, kind: str, first: str, second: str) -> str:
    y = 40 + row * _ROW
    return (
        f'<g class="{kind}"><rect x="{x}" y="{y}" width="{width}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{x + 8}" y="{y + 18}">{escape(first)}</text>'
        f'<text class="small" x="{x + 8}" y="{y + 36}">{escape(second)}</text></g>'
    )


def _class(nic: Nic) -> str:
    if not nic.rail:
        return "unused"
    return "rail" if nic.up and nic.carrier else "rail down"


def _details(nic: Nic) -> str:
    facts = [nic.kind or nic.why_not, nic.addresses[0] if nic.addresses else "no address"]
    if nic.gbit_s:
        facts.append(f"{nic.gbit_s:g} Gbit/s")
    facts.append(f"MTU {nic.mtu}")
    if nic.numa_node >= 0:
        facts.append(f"NUMA {nic.numa_node}")
    return ", ".join(facts)
