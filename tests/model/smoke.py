import random, time, sys, pytest, logging
logging.disable(logging.CRITICAL)
from tests.model.world import *
from tests.model.routing import stand_in
from tests.model.language import WORDS
mp=pytest.MonkeyPatch(); stand_in(mp)
t=time.time()
w=World()
c=w.ask(Wish("k",tuple(WORDS[:3])),0)
n=0
rng=random.Random(1)
while not c.done and n<2000:
    ev=w.events()
    if not ev: print("quiet",n,c); break
    w.happen(rng.choice(ev)); n+=1
    g=[d for d in w.drafters if d.drafts]
    if g and rng.random()<.3: w.happen(lambda: rng.choice(g).grow(rng))
print(n,c, time.time()-t)
w.settle(); w.close()
