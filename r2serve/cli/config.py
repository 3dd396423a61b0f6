"""``r2serve config``: the option table with the values of this environment."""

from __future__ import annotations

import shutil

import click

from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.option import Option, Value, show

_HEADER = """\
# Configuration

Every option is an environment variable and a keyword of `r2serve.Config`. A process reads the
variables once, when the process makes its first communicator. A wrong value stops start-up with an
error that names the field. `r2serve config` prints this table with the current values.
`r2serve config --markdown` prints this page.

| variable | default | unit | allowed | meaning |
|---|---|---|---|---|
"""


def markdown() -> str:
    """Returns ``docs/configuration.md``: the table with all defaults."""
    return _HEADER + "".join(_markdown_row(option) for option, _ in Config().describe())


def _markdown_row(option: Option) -> str:
    default = f"`{show(option.default)}`" if option.default != "" else "(empty)"
    cells = (f"`{option.variable}`", default, option.unit, option.allowed, option.meaning)
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"


def _block(option: Option, value: Value) -> str:
    value_text = show(value) if value != "" else "(empty)"
    unit = f" {option.unit}" if option.unit else ""
    line = click.style(option.variable, bold=True) + f" = {value_text}{unit}"
    if value != option.default:
        line += f"  (default {show(option.default) or '(empty)'})"
    text = click.wrap_text(
        f"{option.meaning}. Allowed: {option.allowed}.",
        width=min(96, shutil.get_terminal_size().columns),
        initial_indent="    ",
        subsequent_indent="    ",
    )
    return f"{line}\n{text}"


@click.command(name="config")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print docs/configuration.md.")
def command(as_markdown: bool) -> None:
    """Show every option with its current value, unit, range and meaning."""
    if as_markdown:
        click.echo(markdown(), nl=False)
        return
    try:
        config = Config.from_env()
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n\n".join(_block(option, value) for option, value in config.describe()))
