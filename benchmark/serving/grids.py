"""What a sweep measures: methods, budgets, caps, temperatures and concurrencies, grouped by server start.

A server start takes 25 to 100 s and fixes method, budget, cap and tensor parallelism; temperature, concurrency and the
load tool are a client's affair. So a grid is a list of starts, and every load of the grid runs on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

PLAIN, CHAIN, TREE, LEAKY = METHODS = ("plain", "chain", "tree", "leaky")
CHAIN_BUDGET = 15  # drafts of a chain: the drafter's block of 16 less its first token


@dataclass(frozen=True)
class Start:
    """One server. budget: draft nodes beside the root; cap: candidates per depth; both None for plain decoding."""

    method: str
    budget: int | None = None
    cap: int | None = None
    tp: int = 1

    @property
    def rows(self) -> int:
        """Rows of one request in a target forward."""
        return 1 if self.budget is None else self.budget + 1

    @property
    def slug(self) -> str:
        """For a file's name."""
        return f"{self.method}-b{self.budget or 0}-c{self.cap or 0}-tp{self.tp}"

    def __str__(self) -> str:
        names = {PLAIN: "plain decoding", CHAIN: f"chain of {CHAIN_BUDGET}"}
        tree = f"{'leaky ' if self.method == LEAKY else ''}tree, budget {self.budget}, cap {self.cap}"
        return names.get(self.method, tree) + (f", TP {self.tp}" if self.tp > 1 else "")


@dataclass(frozen=True)
class Load:
    """Requests to one server. requests: in one repetition, and warm_up before the first; tokens: output tokens of each,
    the end-of-text ignored.
    """

    client: str  # bench_serving, or openai
    temperature: float
    concurrency: int
    requests: int
    tokens: int
    warm_up: int

    def __str__(self) -> str:
        return f"{self.client}, T {self.temperature:g}, {self.concurrency} at a time"


@dataclass(frozen=True)
class Grid:
    """starts x loads, each load repeated. leaky_budgets and leaky_cap: trees whose siblings share recurrent state.

    thrifty: what takes long and matters little is left out. Plain decoding's step depends on neither text nor
    temperature: an eighth of the requests at one stream, none sampled. Sampled traffic gets half of the requests, leaky
    trees a quarter of the greedy traffic of fewest streams, and the OpenAI client is for the others. A load is warmed
    up by a request per stream, where it otherwise sees all of its prompts before they are timed; acceptance by depth
    is counted over the warm-up, so the greedy traffic of fewest streams keeps all of it.
    """

    budgets: tuple[int, ...]
    caps: tuple[int, ...]
    leaky_budgets: tuple[int, ...]
    leaky_cap: int
    traffic: tuple[tuple[float, int], ...]  # (temperature, concurrency)
    tps: tuple[int, ...]
    tokens: int
    repeats: int
    per_stream: int  # requests per stream in one repetition
    at_least: int  # requests in one repetition
    thrifty: bool = False

    def starts(self) -> list[Start]:
        """Plain decoding and the chain first: they are the lines that every tree is compared with."""
        found = []
        for tp in self.tps:
            found += [Start(PLAIN, tp=tp), Start(CHAIN, CHAIN_BUDGET, 1, tp)]
            found += [Start(TREE, b, c, tp) for b, c in product(self.budgets, self.caps)]
            found += [Start(LEAKY, b, self.leaky_cap, tp) for b in self.leaky_budgets]
        return found

    def loads(self, start: Start) -> list[Load]:
        """All traffic through bench_serving, and the greedy one of most streams through the plain OpenAI client too."""

        plain, leaky = (self.thrifty and start.method == method for method in (PLAIN, LEAKY))
        greedy = [t for t in self.traffic if t[0] == 0]

        def load(client: str, temperature: float, concurrency: int) -> Load:
            share = 8 if plain else 4 if leaky else 2 if self.thrifty and temperature > 0 else 1
            requests = max(self.at_least // share, self.per_stream * concurrency)
            brief = plain or leaky or (self.thrifty and (temperature, concurrency) != min(greedy))
            return Load(
                client, temperature, concurrency, requests, self.tokens, concurrency if brief else requests
            )

        if leaky:
            return [load("bench_serving", *min(greedy))]
        if plain:
            return [load("bench_serving", *t) for t in greedy]
        return [load("bench_serving", *t) for t in self.traffic] + [load("openai", *max(greedy))]

    def runs(self) -> int:
        return sum(len(self.loads(start)) for start in self.starts())


BUDGETS = (15, 16, 31, 32, 64, 128, 256)
GRIDS = {
    # Laid out for ten minutes on one GPU at the 27B shape: seven starts, all but the first with its imports done, and
    # five minutes of requests. The demo drafter was trained on 448 tokens, 192 of them a prompt's:
    # after 256 new ones tau falls.
    "quick": Grid(
        budgets=(15, 31, 64),
        caps=(8,),
        leaky_budgets=(15, 64),
        leaky_cap=8,
        traffic=((0.0, 1), (0.0, 8), (0.7, 1)),
        tps=(1,),
        tokens=256,
        repeats=3,
        per_stream=1,
        at_least=8,
        thrifty=True,
    ),
    "full": Grid(
        budgets=BUDGETS,
        caps=(4, 8, 16),
        leaky_budgets=BUDGETS,
        leaky_cap=8,
        traffic=tuple(product((0.0, 0.7), (1, 4, 8, 16))),
        tps=(1, 2, 4),
        tokens=256,
        repeats=3,
        per_stream=2,
        at_least=16,
    ),
    # The demo pair on two cores, where every row costs: small budgets, few requests.
    "cpu": Grid(
        budgets=(15, 31, 64),
        caps=(8,),
        leaky_budgets=(15, 31, 64),
        leaky_cap=8,
        traffic=((0.0, 1), (0.0, 4), (0.7, 1)),
        tps=(1,),
        tokens=96,
        repeats=3,
        per_stream=2,
        at_least=8,
    ),
    # Two budgets, one repetition: shows in minutes that the whole path works.
    "smoke": Grid(
        budgets=(15, 31),
        caps=(8,),
        leaky_budgets=(31,),
        leaky_cap=8,
        traffic=((0.0, 1),),
        tps=(1,),
        tokens=48,
        repeats=1,
        per_stream=1,
        at_least=4,
    ),
}
