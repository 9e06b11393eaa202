"""What the three houses say to each other: error table, job spec, agent messages, event frames, safe codec.

Standard library only. Everyone may import it; it imports nothing of ours. Changing a message here changes the
protocol: raise `PROTOCOL` in `version.py` and keep the previous one readable.
"""
