"""Mutations of files: of their bytes, and of what they mean (trees of JSON and YAML, headers, archives, protobufs)."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutator = Callable[[bytes, random.Random], bytes]

#: Texts that stand in a JSON or YAML file in place of a value.
_RAW = (
    *("null", "true", "false", "0", "-1", "1", "2", "0.5", "-0.0", "1e999", "-1e999", "NaN", "Infinity", "-Infinity"),
    *(str(2**31), str(2**63), str(2**64), str(-(2**63)), "1" + "0" * 400, "1" + "0" * 6000, "1e308", "1e-320", "1e30"),
    *('""', '"x"', '"²"', '"conv2d_²"', '"../../escaped"', '"/etc/passwd"', '"\\ud800"', '"\\u0000"', '"abc"'),
    *('"<script>"', '"int8/channel/sym"', '"int4"', '"float"', '"2026-13-99"', '"nan"', '"1%"', '"re:("', '"[a"'),
    *("[]", "{}", "[[]]", "[{}]", '{"x": 1}', '{"name": "x"}', '[1, "x", null]', '{"a": {"b": {"c": []}}}'),
    *("[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 400 + "1" + "}" * 400, '"' + "x" * 300_000 + '"'),
)
#: Texts that only YAML understands.
_YAML = (
    *("2026-13-99", "2026-01-01", ".inf", ".nan", "~", "!!binary aGk=", "!!set {a}", "!!python/object:os.system x"),
    *("*a", "&a [*a]", "{1: 2, x: 3}", "{null: 1}", "{? [1, 2] : 3}", "0o17", "0x1F", "1_000", "<<: *a", "|", "@", "%"),
    "&a [x, x, x, x, x, x, x, x, x]",
)
_LAUGHS = "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
_LINES = (
    f"a: &a [x, x, x, x, x, x, x, x, x]\n{_LAUGHS}",
    *("%YAML 1.1\n---\n", "---\n", "\t", "? ", "- " * 5000, "{" * 5000, "a: 2026-13-99\n", "1: 2\n", "? [1]\n: 2\n"),
)


def mutate(path: Path, draw: random.Random) -> None:
    """Change one file in place."""
    data = path.read_bytes()
    name = path.name
    kinds: list[Mutator] = [_bytes]
    if name.endswith((".json", ".jsonl")):
        kinds += [_json, _json, _json, _lines]
    elif name.endswith((".yaml", ".yml")):
        kinds += [_yaml, _yaml, _yaml, _lines]
    elif name.endswith(".gz"):
        kinds += [_gzip(_json if name.endswith(".json.gz") else _bytes)] * 3 + [_bomb]
    elif name.endswith(".safetensors"):
        kinds += [_safetensors] * 4
    elif name.endswith((".npz", ".pt2")):
        kinds += [_zip] * 4
    elif name.endswith(".onnx"):
        kinds += [_onnx] * 4
    elif name.endswith((".param", ".tsv", ".txt")):
        kinds += [_lines, _words, _words]
    path.write_bytes(draw.choice(kinds)(data, draw))


def _bytes(data: bytes, draw: random.Random) -> bytes:
    """Cut, flip, insert, repeat, swap."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(8)
        if kind == 0:
            del found[at:]
        elif kind == 1:
            del found[at : at + draw.choice((1, 4, 40))]
        elif kind == 2 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 3:
            found[at:at] = draw.choice((b"\xff", b"\x00", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"[", b"}", b'"', b"\n"))
        elif kind == 4:
            found[at : at + 4] = struct.pack("<I", draw.choice((0, 1, 2**31 - 1, 2**32 - 1)))
        elif kind == 5:
            found[at : at + 8] = struct.pack("<Q", draw.choice((0, 1, 2**40, 2**63, 2**64 - 1)))
        elif kind == 6:
            found[at:at] = found[at : at + 50] * draw.choice((1, 3, 50))
        elif kind == 7:
            return draw.choice((b"", b"\x00" * 100, draw.randbytes(200), b"{}", b"[]", b"null", b"a: 1\n"))
    return bytes(found)


def _lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    kind = draw.randrange(5)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, lines[draw.randrange(len(lines))])
    elif kind == 2:
        lines.insert(at, draw.choice(_LINES).encode())
    elif kind == 3:
        draw.shuffle(lines)
    else:
        lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
    return b"\n".join(lines)


def _words(data: bytes, draw: random.Random) -> bytes:
    words = data.split(b" ")
    for _ in range(draw.choice((1, 2, 5))):
        words[draw.randrange(len(words))] = draw.choice((b"", b"-1", b"1e9", b"99999999999", b"x", "²".encode(), b"="))
    return b" ".join(words)


def _json(data: bytes, draw: random.Random) -> bytes:
    """Of several lines, one; of a document, one or several values or keys."""
    try:
        tree = json.loads(data)
    except ValueError:
        lines = data.splitlines()
        if not lines:
            return _bytes(data, draw)
        at = draw.randrange(len(lines))
        try:
            lines[at] = _tree(json.loads(lines[at]), draw, _RAW).encode("utf-8", "surrogatepass")
        except ValueError:
            return _bytes(data, draw)
        return b"\n".join(lines) + b"\n"
    return _tree(tree, draw, _RAW).encode("utf-8", "surrogatepass")


def _yaml(data: bytes, draw: random.Random) -> bytes:
    """As flow style, which is JSON; raw texts are YAML's."""
    from ruamel.yaml import YAML

    try:
        tree = YAML(typ="safe", pure=True).load(data)
    except Exception:
        return _bytes(data, draw)
    return _tree(tree, draw, (*_RAW, *_YAML)).encode("utf-8", "surrogatepass")


def _tree(tree: Any, draw: random.Random, raw: tuple[str, ...]) -> str:
    """The text of a tree in which some values were replaced, removed, moved or repeated."""
    stand_ins: dict[str, str] = {}

    def stand_in() -> str:
        name = f"@{draw.getrandbits(60)}@"
        stand_ins[json.dumps(name)] = draw.choice(raw)
        return name

    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        places = list(_places(tree))
        if not places:
            tree = stand_in()
            continue
        parent, key = draw.choice(places)
        kind = draw.randrange(9)
        if kind < 4:
            parent[key] = stand_in()
        elif kind == 4:
            del parent[key]
        elif kind == 5:
            other, at = draw.choice(places)
            parent[key] = json.loads(json.dumps(other[at])) if at in _keys(other) and key in _keys(parent) else None
        elif kind == 6 and isinstance(parent, dict):
            new = draw.choice(("", "x", "²", "../x", "\ud800", f"{key}x", "__class__", "name", "1", "a" * 300_000))
            parent[new] = parent.pop(key)
        elif kind == 7 and isinstance(parent, list):
            parent += [parent[key]] * draw.choice((1, 2, 500))
        elif isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            parent[key] = draw.choice((-parent[key], parent[key] * 10**9, parent[key] + 1, float(parent[key]), 0))
        elif isinstance(parent[key], str):
            text = parent[key]
            at = draw.randrange(len(text) + 1)
            parent[key] = text[:at] + draw.choice(("²", "\ud800", "/", "#", ":", "*", " ", "", "9")) + text[at + 1 :]
        else:
            parent[key] = stand_in()
    text = json.dumps(tree, ensure_ascii=draw.random() < 0.5)
    for name, value in stand_ins.items():
        text = text.replace(name, value)
    if draw.random() < 0.05:  # a key that is there twice
        text = text.replace("{", '{"x": 1, "x": 2, ', 1)
    return text


def _keys(value: Any) -> Any:
    return value if isinstance(value, dict) else range(len(value))


def _places(tree: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    stack = [tree]
    while stack:
        item = stack.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        for key in keys:
            found.append((item, key))
            stack.append(item[key])
    return found


def _gzip(inner: Mutator) -> Mutator:
    def mutated(data: bytes, draw: random.Random) -> bytes:
        try:
            return gzip.compress(inner(gzip.decompress(data), draw), 1)
        except (OSError, EOFError):
            return _bytes(data, draw)

    return mutated


def _bomb(data: bytes, draw: random.Random) -> bytes:
    """200 MB of spaces or zeros: as deadly within 500 MB as a gigabyte."""
    piece = gzip.compress(draw.choice((b" ", b"\x00")) * (20 << 20), 9)
    return piece * 10  # members follow each other


def _safetensors(data: bytes, draw: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    kind = draw.randrange(4)
    if kind == 0:
        tree = json.loads(header)
        metadata = tree.setdefault("__metadata__", {})
        known = [name for name in tree if name != "__metadata__"]
        first = known[0] if known else "x"
        metadata["aliases"] = draw.choice(
            (
                *("[]", "null", "1", "x", '"x"', "{", "[" * 100_000, '{"a": 1}', '{"a": null}', '{"a": ["b"]}'),
                *('{"a": "b", "b": "a"}', '{"a": "a"}', json.dumps({first: first}), json.dumps({"x": first})),
                '{"\\ud800": "x"}',
            )
        )
        metadata["bitwright"] = draw.choice(("1", "2", "", "²"))
        header = json.dumps(tree).encode()
    elif kind < 3:
        header = _json(header, draw)
    else:
        header = _bytes(header, draw)
    return struct.pack("<Q", len(header)) + header + rest


def _zip(data: bytes, draw: random.Random) -> bytes:
    """One member of an archive changed, removed, renamed, or made enormous."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        names = old.namelist()
        chosen = draw.choice(names)
        kind = draw.randrange(5)
        for name in names:
            content = old.read(name)
            if name != chosen:
                new.writestr(name, content)
            elif kind == 0:
                new.writestr(name, _json(content, draw) if name.endswith(".json") else _bytes(content, draw))
            elif kind == 1:
                new.writestr(draw.choice(("x", "../x", f"{name}x")), content)
            elif kind == 2 and content[:6] == b"\x93NUMPY":
                new.writestr(name, _npy_header(content, draw))
            elif kind == 3:
                with new.open(name, "w") as member:  # 200 MB of zeros, without having them
                    member.write(content[:200])
                    for _ in range(100):
                        member.write(bytes(2 << 20))
    return out.getvalue()


def _npy_header(content: bytes, draw: random.Random) -> bytes:
    (length,) = struct.unpack("<H", content[8:10])
    head = {
        "descr": draw.choice(
            ("'<f4'", "'|O'", "'<U9'", "'<c16'", "'|V4'", "'x'", "'|b1'", "[('a', '<f4')]", "'<M8[s]'")
        ),
        "fortran_order": draw.choice(("False", "True", "1")),
        "shape": draw.choice(("()", "(0,)", "(-1,)", "(1000000000000,)", "(2, 3)", "None", "(2**70,)", "(1.5,)")),
    }
    text = ("{" + ", ".join(f"'{key}': {value}" for key, value in head.items()) + ", }\n").encode()
    return content[:8] + struct.pack("<H", len(text)) + text + content[10 + length :]


def _onnx(data: bytes, draw: random.Random) -> bytes:
    """Fields of the protobuf: nodes, names, types, shapes, external data, metadata."""
    import onnx

    model = onnx.load_from_string(data)
    graph = model.graph
    kind = draw.randrange(10)
    tensors = list(graph.initializer)
    if kind == 0:
        del graph.node[:]
    elif kind == 1 and graph.node:
        del graph.node[draw.randrange(len(graph.node))]
    elif kind == 2 and graph.node:
        node = draw.choice(list(graph.node))
        node.op_type = draw.choice(("", "Conv", "NoSuchOp", "QuantizeLinear", "Loop", "If"))
    elif kind == 3 and graph.node:
        node = draw.choice(list(graph.node))
        del node.input[:]
    elif kind == 4 and tensors:
        tensor = draw.choice(tensors)
        tensor.data_type = draw.choice((0, 1, 3, 8, 10, 14, 21, 99))
    elif kind == 5 and tensors:
        tensor = draw.choice(tensors)
        tensor.dims.extend(draw.choice(([0], [-1], [2**62], [2**31], [7])))
    elif kind == 6 and tensors:
        tensor = draw.choice(tensors)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = draw.choice(("../../etc/passwd", "/etc/passwd", "", "missing.bin", "seed.onnx", "x\x00y"))
        tensor.external_data.add(key="location", value=place)
        tensor.external_data.add(key="offset", value=draw.choice(("0", "-1", "x", str(2**62))))
        tensor.external_data.add(key="length", value=draw.choice(("0", "4", "-4", str(2**62))))
    elif kind == 7:
        for entry in model.metadata_props:
            entry.value = draw.choice(("", "x", "[]", "{}", "[" * 100_000, '{"a": 1}', '{"a": [1]}', "null", "\u2028"))
    elif kind == 8 and tensors:
        draw.choice(tensors).name = draw.choice(("", "x", "x.scale", "x.codes", "<script>"))
    else:
        model.opset_import[0].version = draw.choice((0, 1, 99, 2**40))
    return bytes(model.SerializeToString())
