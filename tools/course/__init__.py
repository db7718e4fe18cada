"""The course as a whole: its map, its tables, slides, the teacher's guide and the translations.

declaration   reads notebooks/course.toml: the lessons, what each needs, and the paths
map_picture   draws the map
contents      writes the parts of notebooks/README.md that follow from the declaration
glossary      adds the lessons of each term to notebooks/glossary.md
teaching      writes the teacher's guide, notebooks/teaching.md
slides        makes slides from lessons
catalogue     questions of the lessons without a session, for teaching and slides
languages     builds the lessons in other languages
__main__      the command
"""
