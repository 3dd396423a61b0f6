"""An interpreter of the shipped PTX, for tests on the CPU.

text        reads kernels and their instructions from PTX text
arithmetic  translates instructions without effect on other threads into Python
memory      keeps all writes of each byte; a read may return any write that PTX allows
machine     runs threads, blocks and grids, in an order chosen by a seed
node        ranks of a node: their memory, launches, and a model of each rank's proxy
calls       programs of collectives on these ranks, and their right results
counts      loads, stores and fences of system scope in a call, with every poll successful
"""
