"""Whether ranks hold the same.

agreement   what they said about their variables, side by side
checking    asking them
"""
