"""Tuning over many GPUs: TVM's RPC tracker and servers measure, all cores of this machine build.

::

    ladder tune ── builds candidates (:mod:`.building`), a process for each core
        │ asks ── tracker (TVM's) ── which server of the key is free
        └ uploads a module and says what to time with it ── server (:mod:`.serving`), one for each GPU

A server is TVM's own, with two functions more: what it is, and how fast modules are beside cuBLAS in the same rounds.
TVM's ``RPCRunner`` times a candidate alone and returns its seconds; here ratios to cuBLAS of the same rounds decide,
and the GPU's state comes back with them. Whatever process is killed, its work is done again by another
(:mod:`.processes`, which :mod:`.starting` begins before all else); what was measured is on disk when the next
measurement begins (:mod:`.search`), also in the form that TVM's MetaSchedule reads (:mod:`.database`).
"""
