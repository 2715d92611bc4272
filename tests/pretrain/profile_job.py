import cProfile
import io
import pstats

from tests.pretrain.training_runs import pretrain


def prof(line: str):
    p = cProfile.Profile()
    p.enable()
    pretrain(line)
    p.disable()
    s = io.StringIO()
    pstats.Stats(p, stream=s).sort_stats("cumtime").print_stats(60)
    return s.getvalue()
