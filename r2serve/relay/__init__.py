"""The relay of a node: TCP connections between the nodes of a job survive the loss of any NIC.

Node n of a job has the virtual address 127.x.y.(n+1). A connection to a virtual address goes to the
relay of the own node, and over all rails to the relay of the other node.
"""
