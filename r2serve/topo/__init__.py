"""What this node has to carry rails with, and what would keep them from working."""
