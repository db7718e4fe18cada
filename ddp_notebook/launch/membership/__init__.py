"""How the processes of a session come, and how those of a host that is lost go elsewhere.

members         which processes are the ranks: how they are replaced, and get more or fewer
startup         from what was asked for to ranks that can run a cell
spawner         starts them, lets them in on the wire, and shuts them out
lost_hosts      hosts that are not heard any more, and what becomes of their ranks
rank_placement  where these go, and where new ones do
"""
