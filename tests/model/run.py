import faulthandler; faulthandler.dump_traceback_later(270, exit=True)
import sys, time, logging, pytest, traceback, collections, re, random
logging.disable(logging.CRITICAL)
from hypothesis import settings, HealthCheck, Phase
from hypothesis.stateful import run_state_machine_as_test
from tests.model.life import Life
from tests.model.world import World
from tests.model.routing import stand_in
mp=pytest.MonkeyPatch(); stand_in(mp)
n_=int(sys.argv[1]); steps=int(sys.argv[2]); want=sys.argv[3] if len(sys.argv)>3 else ""
flags=sys.argv[4] if len(sys.argv)>4 else ""
found=collections.Counter(); last=None
NAMES=("happen","burst","advance","cut","notice","crash_router","crash_verifier","crash_drafter","lose","settle","ask","read","cancel")
class Stop(Exception): pass
def wrap(name,o):
    def f(self,*a,**k):
        global last
        if getattr(self,'dead',False): return
        outer=not getattr(self,'inside',False)
        if outer and self.history is not None: self.history.append(f"** {name} {a}")
        self.inside=True
        try: return o(self,*a,**k)
        except Exception as e:
            if not self.__dict__.get('dead'):
                self.dead=True
                text=f"{type(e).__name__} {e}" if type(e).__name__!="Violation" else str(e)
                key=re.sub(r"\[[^\]]*\]|\d+","_",text)[:150]; found[key]+=1
                if want and want in text:
                    last=(text,list(self.history), traceback.format_exc()); raise Stop(key) from None
        finally:
            if outer: self.inside=False
    return f
for name in NAMES: setattr(World,name,wrap(name,getattr(World,name)))
class L(Life):
    steady="u" not in flags
    def __init__(self):
        super().__init__(); self.world.history=[] if want else None
t=time.time()
try:
    run_state_machine_as_test(L, settings=settings(max_examples=n_, stateful_step_count=steps, deadline=None, derandomize="r" not in flags, database=None, phases=[Phase.generate]+([Phase.shrink] if want else []), report_multiple_bugs=False,suppress_health_check=list(HealthCheck)))
except Stop as e: pass
finally:
    if last:
        print("\n".join(x[:int(170)] for x in last[1] if "heed" not in x and "drafter" not in x)); print(last[0]); print(last[2][-900:])
    print(time.time()-t)
    for k,v in found.most_common(): print(v,k)
