"""Benchmarks of batch_inference: ``python -m benchmarks [names]``.

    measure     what a measurement is, and how it is judged: values, no I/O
    report      rows to a table and to JSON lines
    machine     pinning to cores, CPU and memory of processes
    workloads   what callers send, what the model does, what must come back
    load        callers in a closed loop, threads or asyncio tasks; every answer is checked
    floors      what the machine allows: a bare pipe round trip, memcpy
    transport   the judged cells, floor beside each, in interleaved rounds
    startup     start and import times, memory of the processes
    batchers    collate and scatter beside plain numpy
    policy      when batches are cut, beside fixed delays
    peers/      us beside our peers
    scale       cost of a request with more processes, workers, and requests waiting
    page        docs/benchmarks.md and its figures, from what was measured
    profile     where the time of one request goes (not part of the default run)

Ratios against a floor measured in the same round carry over to other machines; absolute figures do not.
"""
