"""Names in the larger Wikipedias that a dump does not contain, in lower case."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def phrases(text: str) -> frozenset[str]:
    return frozenset(text.split(", "))


# Old names of the file namespace, which are not in a dump's list of namespaces.
FILE_ALIASES = words("image bild imagen imagem immagine afbeelding grafika attēls kuva fil billede obrázok")

# Templates of disambiguation pages.
DISAMBIGUATION = phrases(
    "disambiguation, disambig, disamb, dab, hndis, geodis, numberdis, letter-number combination, schooldis, "
    "hospitaldis, disambiguation page, begriffsklärung, homonymie, desambiguación, desambiguação, disambigua, dp, "
    "doorverwijspagina, ujednoznacznienie, неоднозначность, багатозначність, aimai, 曖昧さ回避, 消歧义, 消歧義, "
    "disambig-cn, 동음이의, förgrening, gren, flertydig, täsmennyssivu, rozcestník, egyért, anlam ayrımı, "
    "ابهام‌زدایی, توضيح, פירושונים"
)

# Headings of reference sections, by language. Some are also used above prose; `is_passage` decides.
REFERENCE_HEADINGS = frozenset().union(
    phrases(  # English
        "references, external links, see also, further reading, bibliography, notes, sources, footnotes, citations, "
        "notes and references, references and notes, works cited, general references, selected bibliography"
    ),
    phrases(  # German
        "einzelnachweise, weblinks, literatur, siehe auch, quellen, anmerkungen, fußnoten, belege, nachweise, "
        "einzelnachweise und anmerkungen, anmerkungen und einzelnachweise, literatur und quellen, literaturhinweise"
    ),
    phrases(  # French
        "notes et références, références, notes, voir aussi, bibliographie, liens externes, lien externe, annexes, "
        "articles connexes, sources, sources et bibliographie, pour approfondir"
    ),
    phrases(  # Spanish
        "referencias, enlaces externos, véase también, bibliografía, notas, fuentes, notas y referencias, citas, "
        "lectura adicional, lecturas adicionales, bibliografía adicional"
    ),
    phrases("note, bibliografia, voci correlate, altri progetti, collegamenti esterni, fonti, riferimenti"),  # Italian
    phrases(  # Portuguese
        "referências, bibliografia, ver também, ligações externas, notas, fontes, notas e referências, "
        "leitura adicional, leituras adicionais"
    ),
    phrases("referenties, bronnen, externe link, externe links, zie ook, literatuur, noten, voetnoten"),  # Dutch
    phrases("przypisy, bibliografia, linki zewnętrzne, zobacz też, uwagi, źródła, literatura"),  # Polish
    phrases("примечания, ссылки, литература, см. также, источники, сноски, комментарии, библиография"),  # Russian
    phrases("примітки, посилання, література, див. також, джерела, виноски"),  # Ukrainian
    phrases("referenser, källor, externa länkar, se även, litteratur, noter, fotnoter, vidare läsning"),  # Swedish
    phrases("referanser, eksterne lenker, se også, litteratur, kilder, noter, fotnoter"),  # Norwegian
    phrases("referencer, eksterne henvisninger, eksterne links"),  # Danish, besides the Norwegian ones
    phrases("lähteet, viitteet, aiheesta muualla, katso myös, kirjallisuutta"),  # Finnish
    phrases("reference, externí odkazy, literatura, související články, poznámky, odkazy, zdroje"),  # Czech
    phrases("jegyzetek, források, további információk, kapcsolódó szócikkek, irodalom, lásd még"),  # Hungarian
    phrases("kaynakça, dış bağlantılar, ayrıca bakınız, notlar, kaynaklar"),  # Turkish
    phrases("tham khảo, chú thích, liên kết ngoài, xem thêm, ghi chú, đọc thêm"),  # Vietnamese
    phrases("referensi, pranala luar, lihat pula, catatan kaki, bacaan lanjutan"),  # Indonesian
    words("脚注 参考文献 関連項目 外部リンク 注釈 出典 註釈 関連文献 関連書籍 注釈・出典 出典・脚注"),  # Japanese
    words(  # Chinese
        "参考文献 參考文獻 参考资料 參考資料 外部链接 外部連結 外部鏈接 参见 參見 参看 參看 相关条目 相關條目 注释 "
        "註釋 注釋 脚注 腳註 延伸阅读 延伸閱讀 来源 來源"
    ),
    phrases("각주, 같이 보기, 외부 링크, 참고 문헌, 참고문헌, 출처, 주석, 함께 보기"),  # Korean
    phrases("مراجع, المراجع, وصلات خارجية, انظر أيضا, انظر أيضًا, مصادر, المصادر, هوامش"),  # Arabic
    phrases("منابع, پانویس, جستارهای وابسته, پیوند به بیرون"),  # Persian
    phrases("הערות שוליים, קישורים חיצוניים, ראו גם, לקריאה נוספת, ביאורים"),  # Hebrew
)
