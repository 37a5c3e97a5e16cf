"""Commands about reference posteriors: `references` and `grade`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ppl_bnn.cli import complete, console
from ppl_bnn.cli.options import argument, option
from ppl_bnn.core.errors import InputError
from ppl_bnn.references import library
from ppl_bnn.references.reference import REGIONS

ONE = "Show the card and the certificate of this reference."
FILE = (
    "Arrays of what is to be graded, by their names: draws of the outputs of the network as REGION, or mean_REGION and "
    "sd_REGION, or probabilities_REGION; log_density_REGION where targets are held."
)
# Beginnings of the names of arrays of a file, and the argument of `Reference.grade` that each is.
PREFIXES = ("mean_", "sd_", "probabilities_", "log_density_")


def references(name: Annotated[str | None, argument(ONE, "NAME", complete.references)] = None) -> None:
    """List the stored reference posteriors with their grades, or show one."""
    screen = console.new_console()
    if name is not None:
        _show(screen, *library.record(name))
        return
    found = library.entries().values()
    headings = ("reference", "grade", "weights", "rows", "outputs")
    rows = [(one.name, one.grade, *map(str, (one.weights, one.rows, one.outputs))) for one in found]
    screen.print(console.listing(headings, rows, {2, 3, 4}))
    screen.print(
        "A reference has draws of a network's outputs at a frozen grid of inputs. Certified: two samplers agree. "
        "Mode-weighted: chains stay in modes, whose masses are known. Bracketed: bounds of the log evidence meet. "
        "Failed: a record of what did not converge. `ppl-bnn references NAME` shows a certificate, "
        "`ppl-bnn grade NAME FILE.npz` grades your own predictions.",
        markup=False,
    )


def _show(screen: Any, card: Mapping[str, Any], certificate: Mapping[str, Any]) -> None:
    """Print what a reference is of, its grid, and every check of its certificate; those that fail first."""
    arguments = ", ".join(f"{name}={value}" for name, value in card["model"]["arguments"].items())
    screen.print(f"{card['name']}: {card['grade']}", style="bold", markup=False)
    link = card["outputs"]["link"]
    facts = {
        "model": f"{card['model']['name']}({arguments})",
        "weights": f"{card['weights']}: {', '.join(f'{name} {size}' for name, size in card['sites'].items())}",
        "data": f"{card['data']['name']}, {card['rows']} training rows; {card['data']['licence']}",
        "grid": ", ".join(f"{region} {count}" for region, count in card["regions"].items()),
        "graded": "the outputs f" if link == "identity" else f"probabilities, {link}(f)",
        **_of_grade(card),
    }
    screen.print(console.listing(("", ""), facts.items()))
    checks = [each for part in ("full runs", "stored arrays") for each in certificate[f"from the {part}"]]
    for each in sorted(checks, key=lambda each: each["holds"]):
        holds = "holds" if each["holds"] else "FAILS"
        console.say(screen, f"{holds}  {each['value']:>10.4g}  {each['limit']:<8}  {each['name']}")


def _of_grade(card: Mapping[str, Any]) -> dict[str, str]:
    """What a card says of modes and of the log evidence, for each of the two runs."""
    found = {}
    if "modes" in card:
        both = zip(card["modes"]["masses"], card["modes"]["standard errors"], strict=True)
        runs = (", ".join(f"{m:.3f} ± {e:.3f}" for m, e in zip(*each, strict=True)) for each in both)
        found["masses of modes"] = "; ".join(runs)
    if "log evidence" in card:
        found["log evidence"] = "; ".join(
            f"{value:.2f} ± {error:.2f}" for value, error in card["log evidence"]
        )
    if "bounds of the log evidence" in card:
        bounds = card["bounds of the log evidence"]
        found["log evidence"] = "; ".join(
            f"bounds {low:.2f} from below, {high:.2f} from above" for low, high in bounds
        )
    if "calibration" in card:
        known = card["calibration"]
        found["calibration"] = f"{known['simulations']} simulations, ranks of {', '.join(known['functions'])}"
    return found


def grade(
    name: Annotated[str, argument("A reference (see `ppl-bnn references`).", "NAME", complete.references)],
    file: Annotated[Path, argument(FILE, "FILE.npz")],
    report: Annotated[bool, option("Also write a page, beside the file.")] = False,
    out: Annotated[Path | None, option("The page.", "FILE.html", "beside FILE.npz")] = None,
) -> None:
    """Grade predictions of any origin against a reference posterior."""
    found = library.load(name).grade(**_arguments(file))
    screen = console.new_console()
    console.say(screen, str(found))
    if report or out is not None:
        page = console.write_report(console.new_console(error=True), found, out or file.with_suffix(".html"))
        console.say(screen, str(page))


def _arguments(file: Path) -> dict[str, dict[str, np.ndarray]]:
    """The arguments of `Reference.grade` from the arrays of a file."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        advice = "np.savez(FILE, test=draws)"
        raise InputError.of("FILE", "a .npz file of arrays", f"{file} ({error})", advice) from error
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, value in arrays.items():
        prefix = next((each for each in PREFIXES if name.startswith(each)), "")
        region = name.removeprefix(prefix)
        expected = f"names such as test, mean_test, probabilities_test; regions: {', '.join(REGIONS)}"
        InputError.check(region in REGIONS, "FILE", expected, name, "renaming that array")
        found.setdefault(prefix.removesuffix("_") or "draws", {})[region] = value
    return found
