import faulthandler; faulthandler.dump_traceback_later(270, exit=True)
import sys, time, logging, pytest, traceback, collections, re
logging.disable(logging.CRITICAL)
from hypothesis import settings, HealthCheck, Phase, seed
from hypothesis.stateful import run_state_machine_as_test
from tests.model.life import Life
from tests.model.world import World
from tests.model.routing import stand_in
from tests.model.redis import Violation
mp=pytest.MonkeyPatch(); stand_in(mp)
n_=int(sys.argv[1]); steps=int(sys.argv[2]); want=sys.argv[3] if len(sys.argv)>3 else None
found=collections.Counter(); runs=0; events=0
class L(Life):
    steady = len(sys.argv)<5
    def __init__(self):
        super().__init__(); self.world.history=[] if want else None
        if want:
            for n in ('cut','notice','crash_router','crash_verifier','crash_drafter','lose','advance','ask','read','cancel','settle'):
                def mk(n,o):
                    def f(*a,**k):
                        self.world.history.append(f'** {n} {a} {k}'); return o(*a,**k)
                    return f
                setattr(self.world,n,mk(n,getattr(self.world,n)))
    def teardown(self):
        global runs,events
        runs+=1
        try: super().teardown()
        except Violation as e: self.note(e)
    def note(self,e):
        k=re.sub(r"\[[^\]]*\]|\d+","_",str(e))[:110]
        found[k]+=1
        if want and want in str(e): raise e
import functools
orig=World.happen; 
def wrap(name):
    f=getattr(L,name)
def patch(cls):
    o=World.check
    def check(self):
        global events; events+=1
        if getattr(self,'dead',False): return
        try: o(self)
        except Violation as e:
            self.dead=True; raise
t=time.time()
for name in ("happen","burst","advance","cut","notice","crash_router","crash_verifier","crash_drafter","lose","settle"):
    def mk(o):
        @functools.wraps(o)
        def f(self,*a,**k):
            global events
            if name=="happen": events+=1
            if getattr(self,'dead',False): return
            try: return o(self,*a,**k)
            except Violation as e:
                if not getattr(self,'dead',False):
                    self.dead=True
                    k_=re.sub(r"\[[^\]]*\]|\d+","_",str(e))[:150]; found[k_]+=1
                    if want and want in str(e):
                        self.last=list(self.history); global LAST; LAST=(str(e),self.last); raise
        return f
    setattr(World,name,mk(getattr(World,name)))
ph=[Phase.generate]+([Phase.shrink] if want else [])
try:
    run_state_machine_as_test(L, settings=settings(max_examples=n_, stateful_step_count=steps, deadline=None, derandomize=False, database=None, phases=ph, suppress_health_check=list(HealthCheck)))
finally:
    if want: print('\n'.join(x[:230] for x in LAST[1][-int(90):])); print(LAST[0])
    print(time.time()-t, "runs",runs)
    for k,v in found.most_common(): print(v,k)
