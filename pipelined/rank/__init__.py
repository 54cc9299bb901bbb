"""The actor: schedule, launch, results, commit. The Planner protocol that rank 0 is given."""

from pipelined.rank.actor import Rank
from pipelined.rank.config import Peers, RankConfig
from pipelined.rank.links import LinkPlan, Links, open_links
from pipelined.rank.planner import Planner

__all__ = ["LinkPlan", "Links", "Peers", "Planner", "Rank", "RankConfig", "open_links"]
