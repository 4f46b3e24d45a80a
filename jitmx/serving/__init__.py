"""What a served model launches: vLLM's layers, warm-up, bundles and the cost of a step ask here.

needed.py          Needed, the form: what decides the kernels of a layer, and which these are
linear.py          a dense product, what quantizes and packs its weight, and what is fused with it
experts.py         a layer of experts with its routing
attention.py       a layer's attention, whatever requests a batch is made of
sampler.py         the tokens of greedy batches
model.py           all that the layers of a model take
draft.py           all that an Eagle3 draft takes
products.py        products and experts of a block on torch tensors, with what is fused for so many rows
rounded_inputs.py  from how many rows on inputs are rounded to 8 bits
model_step.py      a step of decoding, launch by launch, with what each costs
draft_step.py      the same of a draft, and what speculation gains
"""
