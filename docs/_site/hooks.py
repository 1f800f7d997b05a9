"""Pages of the site that are not Markdown files in `docs/`: results, examples, the notebook and the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from bitwright.cli.app import all_commands

ROOT = Path(__file__).parents[2]
RESULTS = ("benchmarks/*.yaml", "benchmarks/results/*.md", "benchmarks/results/*.svg")
EXAMPLES = ("examples/*/*.md", "examples/*/*.py", "examples/*/*.sh")


def on_files(files: Any, config: Any) -> Any:
    """Add pages from elsewhere in the repository under their own paths."""
    for pattern in (*RESULTS, *EXAMPLES):
        for source in sorted(ROOT.glob(pattern)):
            uri = source.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(source)))
    files.append(File.generated(config, "notebook.md", content=notebook()))
    files.append(File.generated(config, "reference/command-line.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change links: in the repository `docs/` is a folder and the notebook is a file; on the site both are pages."""
    uri = page.file.src_uri
    markdown = markdown.replace("notebook.ipynb)", "notebook.md)")
    depth = uri.count("/")
    if uri.startswith(("benchmarks/", "examples/")):
        up = "../" * depth
        return markdown.replace(f"]({up}docs/", f"]({up}")
    up = "../" * (depth + 1)
    return re.sub(rf"\]\({re.escape(up)}(benchmarks|examples)/", rf"]({'../' * depth}\1/", markdown)


def notebook() -> str:
    """The notebook as a page, without outputs."""
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for text, kind in texts) + "\n"


def command_line() -> str:
    """The reference of all verbs, from their --help."""
    lines = [
        "# The command line",
        "",
        "`bitwright VERB --help` shows the same. `bitwright --install-completion` installs shell completion of verbs,",
        "options, and the names of workloads, backends, quantizers and other plugins.",
        "",
    ]
    for name, command in all_commands():
        about, _, examples = command.help.partition("\b\nExamples:\n")
        lines += [f"## bitwright {name}", "", about.strip(), "", "```"]
        lines += [line.strip() for line in examples.strip().splitlines()]
        lines += ["```", "", "| | |", "|---|---|"]
        lines += [f"| {_cell(f'`{left}`')} | {_cell(right)} |" for left, right in _records(command)]
        lines += [""]
    return "\n".join(lines)


def _records(command: Any) -> list[tuple[str, str]]:
    context = command.context_class(command, info_name=command.name)
    return [record for one in command.params if (record := one.get_help_record(context)) is not None]


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("[", r"\[") if "`" not in text else text.replace("|", r"\|")
